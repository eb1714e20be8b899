"""Whole steps against plain ones: gradients are the oracle, and the optimizer sees them."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_cases import loss_fn, make_batch, make_params, mesh
from step_cases import RATE, assert_same, batches, make_step, plain_steps

from unified_ddp.jax import DistributedDataParallel, pad_batch

pytestmark = pytest.mark.timeout(120)


def run(step: Any, params: Any, data: list[Any], buffers: Any = None, **arguments: Any) -> Any:
    state, values = step.init(params, buffers), []
    for batch in data:
        state, value = step(state, batch, **arguments)
        values.append(value)
    return state, values


@pytest.mark.parametrize(("size", "strategy", "accumulate"), [(2, "flat", 1), (4, "tuple", 1), (4, "flat", 2)])
def test_steps_are_plain_steps(size: int, strategy: Any, accumulate: int) -> None:
    params, optimizer = make_params(), optax.adamw(0.01)
    step = make_step(params, loss_fn, size, optimizer, strategy=strategy, accumulate=accumulate)
    state, losses = run(step, params, batches())
    want, want_losses = plain_steps(loss_fn, params, optimizer, batches(), size * accumulate)
    assert_same(state.params, want)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    assert (int(state.step), int(state.skipped)) == (3, 0)
    for leaf in jax.tree.leaves(state.params):
        assert len({np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}) == 1


@pytest.mark.parametrize(
    ("reduction", "initial", "accumulate"),
    [("weighted_mean", True, 1), ("weighted_mean", False, 2), ("mean", False, 2), ("mean", True, 1)],
)
def test_weights(reduction: Any, initial: bool, accumulate: int) -> None:
    """Four replicas: one without any weight, the others with different ones."""
    params, batch = make_params(), batches(1, 16)[0]
    weight = np.array([1, 1, 1, 1, 0.5, 2, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0], np.float32)

    def each(params: Any, batch: Any) -> Any:
        return jax.vmap(lambda x, y: loss_fn(params, {"x": x[None], "y": y[None]}))(batch["x"], batch["y"])

    def objective(params: Any) -> Any:
        terms, w = (each(params, batch) * weight).reshape(4, 4).sum(1), weight.reshape(4, 4).sum(1)
        if reduction == "weighted_mean":
            return terms.sum() / w.sum()
        return (terms / np.where(w > 0, w, 1)).sum() / (4 if initial else 3)

    def loss(params: Any, batch: Any) -> Any:
        losses = each(params, batch)
        return losses, {"doubled": 2 * losses}

    options = {"reduction": reduction, "divide_by_initial_world_size": initial, "accumulate": accumulate}
    step = make_step(params, loss, 4, optax.sgd(1.0), has_aux=True, **options)
    state, [(value, aux)] = run(step, params, [batch], weight=weight)
    assert_same(jax.tree.map(jnp.subtract, params, state.params), jax.grad(objective)(params), 1e-4)
    np.testing.assert_allclose(value, objective(params), rtol=1e-5)
    np.testing.assert_allclose(aux["doubled"], 2 * value, rtol=1e-6)


def test_every_example_counts_the_same_in_a_batch_that_was_filled_up() -> None:
    params, whole = {"w": jnp.array([0.5, -1.0, 2.0])}, batches(1, 5)[0]
    batch, weight = pad_batch({"x": np.asarray(whole["x"])}, 8)
    assert weight.tolist() == [1, 1, 1, 1, 1, 0, 0, 0]

    def each(params: Any, batch: Any) -> Any:
        return jnp.log(jnp.abs(batch["x"] @ params["w"]))  # not finite for rows of zeros

    step = make_step(params, each, 4, optax.sgd(1.0))
    state, _ = run(step, params, [batch], weight=weight)
    want = jax.grad(lambda p: each(p, whole).mean())(params)
    assert_same(jax.tree.map(jnp.subtract, params, state.params), want, 1e-4)


def test_a_batch_of_nothing_changes_nothing() -> None:
    params = make_params()
    batch, weight = pad_batch(jax.tree.map(lambda x: np.asarray(x)[:0], make_batch()), 8)
    step = make_step(params, lambda p, b: jnp.ones(len(b["x"])) * loss_fn(p, b), 2, optax.sgd(1.0))
    state, [loss] = run(step, params, [batch], weight=weight)
    assert_same(state.params, params, 0)
    assert loss == 0


@pytest.mark.parametrize("accumulate", [1, 2])
def test_padding_that_a_loss_cannot_take_is_harmless(accumulate: int) -> None:
    """A replica (and a microbatch) of zeros alone, whose gradients would be zero times infinity."""
    params = {"scale": jnp.float32(3)}
    step = make_step(params, lambda p, b: p["scale"] * jnp.log(b), 2, optax.sgd(1.0), accumulate=accumulate)
    batch = np.array([2, 3, 2, 3, 0, 0, 0, 0], np.float32)[:: -1 if accumulate > 1 else 1]
    state, [loss] = run(step, params, [batch], weight=(batch > 0).astype(np.float32))
    mean = np.log([2.0, 3.0]).mean()
    np.testing.assert_allclose([loss, state.params["scale"]], [3 * mean, 3 - mean], rtol=1e-5)


def _with_norm(params: Any, batch: Any, buffers: Any) -> Any:
    mean = batch["x"].mean()
    return loss_fn(params, batch), {"mean": 0.5 * buffers["mean"] + 0.5 * mean, "count": buffers["count"] + 1}


@pytest.mark.parametrize(("buffer_sync", "accumulate"), [("broadcast", 2), ("mean", 1)])
def test_buffers(buffer_sync: Any, accumulate: int) -> None:
    params, data = make_params(), batches(2)
    step = make_step(params, _with_norm, 2, buffer_sync=buffer_sync, accumulate=accumulate)
    state, _ = run(step, params, data, {"mean": jnp.float32(1), "count": jnp.int32(0)})
    mean = 1.0
    for batch in data:
        own = [mean, mean]
        for replica, rows in enumerate(np.split(np.asarray(batch["x"]), 2)):
            for part in np.split(rows, accumulate):
                own[replica] = 0.5 * own[replica] + 0.5 * part.mean()
        mean = own[0] if buffer_sync == "broadcast" else sum(own) / 2
    np.testing.assert_allclose(state.buffers["mean"], mean, rtol=1e-5)
    assert state.buffers["count"] == 2 * accumulate
    assert all(float(shard.data) == float(state.buffers["mean"]) for shard in state.buffers["mean"].addressable_shards)


@pytest.mark.parametrize(("buffer_sync", "accumulate"), [("broadcast", 2), ("mean", 1), ("mean", 2)])
def test_buffers_of_padding_are_not_taken(buffer_sync: Any, accumulate: int) -> None:
    """Replicas 0 and 3 have no data; the second microbatch of replica 1 has none either, if there are two."""

    def with_norm(params: Any, batch: Any, buffers: Any) -> Any:
        loss, buffers = _with_norm(params, batch, buffers)
        return loss * jnp.ones(len(batch["x"])), buffers

    params, [batch] = make_params(), batches(1, 16)
    weight = np.array([0] * 4 + [1, 1, 0, 0] + [1] * 4 + [0] * 4, np.float32)
    step = make_step(params, with_norm, 4, buffer_sync=buffer_sync, accumulate=accumulate)
    state, _ = run(step, params, [batch], {"mean": jnp.float32(1), "count": jnp.int32(0)}, weight=weight)
    rows = np.split(np.asarray(batch["x"]), 4)
    own = {1: 1.0, 2: 1.0}
    for replica in own:
        parts = np.split(rows[replica], accumulate)
        for part in parts[:1] if replica == 1 else parts:
            own[replica] = 0.5 * own[replica] + 0.5 * part.mean()
    mean = own[1] if buffer_sync == "broadcast" else sum(own.values()) / 2
    np.testing.assert_allclose(state.buffers["mean"], mean, rtol=1e-5)
    assert state.buffers["count"] == 1
    nothing = step(state, batch, weight=np.zeros(16, np.float32))[0]
    assert_same(nothing.buffers, state.buffers, 0)


@pytest.mark.parametrize(("key", "accumulate"), [(jax.random.key, 1), (jax.random.PRNGKey, 2)])
def test_keys_differ_by_step_replica_and_microbatch(key: Any, accumulate: int) -> None:
    params = make_params()
    rng = key(7)

    def loss(params: Any, batch: Any, rng: Any) -> Any:
        return loss_fn(params, batch), jax.random.normal(rng, ())

    step = make_step(params, loss, 4, accumulate=accumulate, has_aux=True)
    _, values = run(step, params, batches(2, 16), rng=rng)
    for number, (_, noise) in enumerate(values):
        keys = [jax.random.fold_in(jax.random.fold_in(rng, number), replica) for replica in range(4)]
        if accumulate > 1:
            keys = [jax.random.fold_in(k, part) for k in keys for part in range(accumulate)]
        np.testing.assert_allclose(noise, np.mean([jax.random.normal(k, ()) for k in keys]), rtol=1e-5)


@pytest.mark.parametrize("kind", ["names", "mask", "prefix"])
def test_frozen_parameters(kind: str) -> None:
    params, data = make_params(), batches()
    frozen = ("dense1.kernel", "dense1.bias", "scale")
    mask = jax.tree.map(lambda _: True, params) | {"dense1": {"kernel": False, "bias": False}, "scale": False}
    prefix = dict.fromkeys(params, True) | {"dense1": False, "scale": False}
    trainable = {"names": lambda name: name not in frozen, "mask": mask, "prefix": prefix}[kind]
    step = make_step(params, loss_fn, 2, optax.adam(0.01), trainable=trainable)
    state, _ = run(step, params, data)
    rest = {name: value for name, value in params.items() if name not in ("dense1", "scale")}
    held = {name: params[name] for name in ("dense1", "scale")}
    want, _ = plain_steps(lambda p, b: loss_fn(p | held, b), rest, optax.adam(0.01), data, 2)
    assert_same({name: state.params[name] for name in rest}, want)
    assert_same({name: state.params[name] for name in held}, held, 0)
    assert len(jax.tree.leaves(state.opt_state)) == 1 + 2 * len(jax.tree.leaves(rest))


def test_leaves_that_cannot_be_trained_stay() -> None:
    extra = {"steps": jnp.int32(3), "mask": jnp.array([True, False]), "key": jax.random.key(3), "nothing": None}
    params = make_params()
    step = make_step(params | extra, loss_fn, 2)
    state, _ = run(step, params | extra, batches())
    want, _ = plain_steps(loss_fn, params, optax.sgd(RATE, momentum=0.9), batches(), 2)
    assert_same({name: state.params[name] for name in params}, want)
    assert (int(state.params["steps"]), state.params["nothing"]) == (3, None)
    assert jnp.array_equal(jax.random.key_data(state.params["key"]), jax.random.key_data(extra["key"]))


def test_compute_dtype() -> None:
    params, data, seen = make_params(), batches(), []

    def loss(params: Any, batch: Any) -> Any:
        seen.extend(leaf.dtype for leaf in jax.tree.leaves((params, batch)))
        return loss_fn(params, batch)

    state, values = run(make_step(params, loss, 2, compute_dtype=jnp.bfloat16), params, data)
    assert set(seen) == {jnp.dtype("bfloat16")}
    assert {leaf.dtype for leaf in jax.tree.leaves((state.params, state.opt_state))} == {jnp.dtype("float32")}
    want, losses = plain_steps(loss_fn, params, optax.sgd(RATE, momentum=0.9), data, 2)
    assert_same(state.params, want, 0.05)
    np.testing.assert_allclose(values, losses, rtol=0.05)


@pytest.mark.parametrize("strategy", ["flat", "tuple"])
def test_reduce_dtype(strategy: Any) -> None:
    params, data = make_params(), batches()
    step = make_step(params, loss_fn, 2, reduce_dtype=jnp.bfloat16, strategy=strategy)
    text = step.lower(step.init(params), data[0]).as_text()
    kinds = re.findall(r"\(tensor<(?:[\dx]*x)?(bf16|f32)>\) -> ", "\n".join(_all_reduces(text)))
    assert kinds.count("bf16") == len(kinds) - 1  # all but the loss
    state, _ = run(step, params, data)
    want, _ = plain_steps(loss_fn, params, optax.sgd(RATE, momentum=0.9), data, 2)
    assert_same(state.params, want, 0.02)


def _all_reduces(text: str) -> list[str]:
    return re.findall(r"stablehlo\.all_reduce.*?\}\) : \([^)]*\) -> ", text, flags=re.DOTALL)


@pytest.mark.parametrize("strategy", ["flat", "tuple"])
def test_accumulation_lowers_to_one_reduction_after_the_scan(strategy: Any) -> None:
    params = make_params()
    step = make_step(params, loss_fn, 2, accumulate=2, strategy=strategy)
    lines = step.lower(step.init(params), make_batch()).as_text().splitlines()
    found = [line for line in lines if re.search(r'= "?stablehlo\.(while|all_reduce)\b', line)]
    assert ["while" in line for line in found] == [True] + [False] * (len(found) - 1)
    leaves = len(jax.tree.leaves(params))
    assert len(found) - 1 == (1 if strategy == "flat" else leaves) + 1  # and the loss
    assert len({len(line) - len(line.lstrip()) for line in found}) == 1


def test_clipping_comes_after_the_reduction() -> None:
    params, data = make_params(), batches()
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0))
    state, _ = run(make_step(params, loss_fn, 4, optimizer), params, data)
    want, _ = plain_steps(loss_fn, params, optimizer, data, 4)
    assert_same(state.params, want)


def test_statistics_over_all_replicas() -> None:
    """As a synchronised batch norm takes them: the step is that of the whole batch."""
    params, batch = {"w": make_params()["dense1"]["kernel"], "scale": jnp.float32(2)}, make_batch()

    def loss(params: Any, batch: Any, mean: Any) -> Any:
        hidden = batch["x"] @ params["w"]
        return jnp.mean((hidden - mean(hidden.mean(0))) ** 2) * params["scale"]

    step = make_step(params, lambda p, b: loss(p, b, lambda x: jax.lax.pmean(x, "data")), 4, optax.sgd(1.0))
    state, _ = run(step, params, [batch])
    want = jax.grad(lambda p: loss(p, batch, lambda x: x))(params)
    assert_same(jax.tree.map(jnp.subtract, params, state.params), want, 1e-4)


def test_static_arguments_are_compiled_for() -> None:
    params, seen = make_params(), []

    def loss(params: Any, batch: Any, *, factor: float, train: bool) -> Any:
        seen.append((factor, train))
        return factor * loss_fn(params, batch)

    step, batch = make_step(params, loss, 2), make_batch()
    state = step.init(params)
    losses = [float(step(state, batch, factor=f, train=True)[1]) for f in (1.0, 2.0, 1.0)]
    assert losses[1] == 2 * losses[0] == 2 * losses[2]
    assert set(seen) == {(1.0, True), (2.0, True)}


def test_scalars_in_the_batch_go_to_all_replicas() -> None:
    params, batch = make_params(), make_batch()
    step = make_step(params, lambda p, b: b["factor"] * loss_fn(p, b), 2, optax.sgd(1.0), accumulate=2)
    one, two = (run(step, params, [batch | {"factor": f}])[1][0] for f in (1.0, 2.0))
    assert float(two) == 2 * float(one)


@pytest.mark.parametrize("donate", [False, True])
def test_donation(donate: bool) -> None:
    params = make_params()
    step = make_step(params, loss_fn, 2, donate=donate)
    old = step.init(params)
    step(old, make_batch())
    assert old.params["scale"].is_deleted() == donate
    assert not params["scale"].is_deleted()


def test_many_steps_without_waiting() -> None:
    """Unbounded, some hundred steps in flight abort the process."""
    params, batch = make_params(), make_batch()
    step = make_step(params, loss_fn, 4)
    state = step.init(params)
    for _ in range(500):
        state, loss = step(state, batch)
        assert loss.is_ready()
    assert int(state.step) == 500


def test_steps_in_flight_are_bounded() -> None:
    params, batch = make_params(), make_batch()
    step = make_step(params, loss_fn, 2, max_in_flight=1)
    state, losses = step.init(params), []
    for _ in range(10):
        state, loss = step(state, batch)
        losses.append(loss)
        assert all(loss.is_ready() for loss in losses[:-1])
    step.wait()
    assert losses[-1].is_ready()


@pytest.mark.parametrize("strategy", ["flat", "tuple"])
def test_mesh_with_a_model_axis(strategy: Any) -> None:
    """Its axes are left to the compiler: params that are sharded over it stay so."""
    params = {"kernel": jax.random.normal(jax.random.key(0), (3, 4)), "bias": jnp.ones(4)}

    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean(jnp.tanh(batch["x"] @ params["kernel"] + params["bias"]).sum(1) ** 2)

    devices = mesh(2, "data", 2, "model")
    ddp = DistributedDataParallel(params, strategy=strategy)
    step = ddp.train_step(loss, optax.sgd(RATE, momentum=0.9), mesh=devices)
    split = NamedSharding(devices, P(None, "model"))
    placed = {"kernel": jax.device_put(params["kernel"], split), "bias": params["bias"]}
    state, _ = run(step, placed, batches())
    want, _ = plain_steps(loss, params, optax.sgd(RATE, momentum=0.9), batches(), 2)
    assert_same(state.params, want)
    assert state.params["kernel"].sharding.is_equivalent_to(split, 2)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_mesh_that_is_set(kind: AxisType) -> None:
    """jax.make_mesh makes explicit axes by default."""
    devices = jax.make_mesh((2,), ("data",), devices=jax.devices("cpu")[:2], axis_types=(kind,))
    with jax.set_mesh(devices):
        step = DistributedDataParallel(make_params()).train_step(loss_fn, optax.sgd(RATE), mesh=devices)
        state, _ = run(step, make_params(), batches())
    want, _ = plain_steps(loss_fn, make_params(), optax.sgd(RATE), batches(), 2)
    assert_same(state.params, want)


def test_two_data_axes() -> None:
    params = make_params()
    ddp = DistributedDataParallel(params, axis_name=("host", "device"))
    step = ddp.train_step(loss_fn, optax.sgd(RATE), mesh=mesh(2, "host", 2, "device"))
    state, _ = run(step, params, batches())
    want, _ = plain_steps(loss_fn, params, optax.sgd(RATE), batches(), 4)
    assert_same(state.params, want)
