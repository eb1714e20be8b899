"""Mean gradients against the oracle, in every mapping."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_cases import Replicas, assert_all_close, loss_fn, make_batch, make_params, mean_of, mesh, oracle, shards

from unified_ddp.errors import AxisError
from unified_ddp.jax import DistributedDataParallel
from unified_ddp.plan import MIB

pytestmark = pytest.mark.timeout(120)

TINY_CAP = 40 / MIB  # bytes; several buckets from a few leaves


@pytest.mark.parametrize("strategy", ["flat", "tuple"])
def test_value_and_grad_is_the_oracle(replicas: Replicas, strategy: Any) -> None:
    params, batch = make_params(), make_batch()
    ddp = DistributedDataParallel(params, bucket_cap_mb=TINY_CAP, strategy=strategy)
    assert len(ddp.plan.buckets) > 2

    def step(params: Any, batch: Any) -> Any:
        loss, grads = ddp.value_and_grad(loss_fn)(params, batch)
        return ddp.mean(loss), grads

    loss, grads = replicas(step, params, batch)
    assert_all_close(grads, oracle(loss_fn, params, batch, replicas.size))
    assert_all_close(loss, mean_of([loss_fn(params, shard) for shard in shards(batch, replicas.size)]))


@pytest.mark.parametrize("has_aux", [False, True])
def test_grad_gives_the_gradients_alone(pair: Replicas, has_aux: bool) -> None:
    params, batch = make_params(), make_batch()
    ddp = DistributedDataParallel(params)

    def loss(params: Any, batch: Any) -> Any:
        return (loss_fn(params, batch), batch["x"].sum()) if has_aux else loss_fn(params, batch)

    def step(params: Any, batch: Any) -> Any:
        result = ddp.grad(loss, has_aux=has_aux)(params, batch)
        return (result[0], ddp.mean(result[1])) if has_aux else (result, ddp.mean(batch["x"].sum()))

    grads, aux = pair(step, params, batch)
    assert_all_close(grads, oracle(loss_fn, params, batch, 2))
    np.testing.assert_allclose(aux, np.asarray(batch["x"]).sum() / 2, rtol=1e-5)


def test_frozen_parameters_have_no_gradient(pair: Replicas) -> None:
    params, batch = make_params(), make_batch()
    ddp = DistributedDataParallel(params, trainable=lambda name: not name.startswith("dense1"))
    assert not {spec.name for spec in ddp.plan.params} & {"dense1.kernel", "dense1.bias"}
    grads = pair(lambda p, b: ddp.value_and_grad(loss_fn)(p, b)[1], params, batch)
    assert grads.pop("dense1") == {"kernel": None, "bias": None}
    want = oracle(loss_fn, params, batch, 2)
    del want["dense1"]
    assert_all_close(grads, want)


@pytest.mark.parametrize(("mapping", "strategy"), [("checked", "flat"), ("vmap", "tuple")])
def test_reduce_dtype(mapping: str, strategy: Any) -> None:
    params, batch = make_params(), make_batch()
    ddp = DistributedDataParallel(params, reduce_dtype=jnp.bfloat16, strategy=strategy)
    grads = Replicas(mapping, 2)(lambda p, b: ddp.value_and_grad(loss_fn)(p, b)[1], params, batch)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {np.dtype(np.float32)}
    assert_all_close(grads, oracle(loss_fn, params, batch, 2), 2e-2)
    rounded = jax.tree.map(lambda g: g == jnp.asarray(g).astype(jnp.bfloat16).astype(jnp.float32), grads)
    assert all(np.all(leaf) for leaf in jax.tree.leaves(rounded))


def test_loss_comes_back_local(replicas: Replicas) -> None:
    params, batch = make_params(), make_batch()
    ddp = DistributedDataParallel(params)
    losses = replicas(lambda p, b: ddp.value_and_grad(loss_fn)(p, b)[0], params, batch, local=True)
    want = [loss_fn(params, shard) for shard in shards(batch, replicas.size)]
    np.testing.assert_allclose(losses, want, rtol=1e-5)


def test_unused_parameters_get_zeros(pair: Replicas) -> None:
    params, batch = make_params(), make_batch()
    ddp = DistributedDataParallel(params)
    grads = pair(lambda p, b: ddp.value_and_grad(loss_fn)(p, b)[1], params, batch)
    assert np.array_equal(grads["unused"], np.zeros((2, 7)))


def test_leaves_without_gradients_give_none(pair: Replicas) -> None:
    params, batch = make_params(), make_batch()
    extra = {"steps": jnp.int32(3), "mask": jnp.array([True, False]), "key": jax.random.key(3), "nothing": None}
    ddp = DistributedDataParallel(params | extra)

    def loss(params: Any, batch: Any) -> Any:
        noise = jax.random.normal(params["key"], ()) * params["mask"][0]
        return loss_fn(params, batch) * params["steps"] + noise

    def step(params: Any, batch: Any) -> Any:
        return ddp.value_and_grad(loss)(params, batch)[1]

    grads = pair(step, params | extra, batch)
    assert all(grads[name] is None for name in extra)
    want = oracle(lambda p, b: loss(p | extra, b), params, batch, 2)
    assert_all_close({name: grads[name] for name in params}, want)


@pytest.mark.parametrize("has_aux", [False, True])
def test_argnums_aux_and_keywords(pair: Replicas, has_aux: bool) -> None:
    params, batch = make_params(), make_batch()
    ddp = DistributedDataParallel(params)

    def loss(batch: Any, params: Any, *, factor: float) -> Any:
        value = factor * loss_fn(params, batch)
        return (value, {"examples": batch["x"].shape[0]}) if has_aux else value

    def step(params: Any, batch: Any) -> Any:
        value, grads = ddp.value_and_grad(loss, argnums=1, has_aux=has_aux)(batch, params, factor=3.0)
        if has_aux:
            assert value[1] == {"examples": 4}
        return grads

    assert_all_close(pair(step, params, batch), oracle(lambda p, b: 3 * loss_fn(p, b), params, batch, 2))


def test_several_argnums_are_one_tuple_of_params(pair: Replicas) -> None:
    params, batch = make_params(), make_batch()
    head = {"head": params.pop("head")}
    ddp = DistributedDataParallel((params, head))

    def loss(params: Any, batch: Any, head: Any) -> Any:
        return loss_fn(params | head, batch)

    def step(both: Any, batch: Any) -> Any:
        return ddp.value_and_grad(loss, argnums=(0, -1))(both[0], batch, both[1])[1]

    want = oracle(lambda both, b: loss_fn(both[0] | both[1], b), (params, head), batch, 2)
    assert_all_close(pair(step, (params, head), batch), want)


@pytest.mark.parametrize(("dtype", "strategy"), [("bfloat16", "flat"), ("float16", "tuple")])
def test_half_precision(pair: Replicas, dtype: str, strategy: Any) -> None:
    params, batch = make_params(dtype), make_batch(dtype=dtype)
    params["head"] = {"kernel": params["head"]["kernel"].astype(jnp.float32)}  # two dtypes, so two buckets at least
    ddp = DistributedDataParallel(params, strategy=strategy)
    assert {bucket.dtype for bucket in ddp.plan.buckets} == {dtype, "float32"}
    grads = pair(lambda p, b: ddp.value_and_grad(loss_fn)(p, b)[1], params, batch)
    assert jax.tree.map(lambda g: g.dtype, grads) == jax.tree.map(lambda p: p.dtype, params)
    assert_all_close(grads, oracle(loss_fn, params, batch, 2), tolerance=3e-2)


def test_float64(pair: Replicas) -> None:
    with jax.enable_x64(True):
        params, batch = make_params(jnp.float64), make_batch(dtype=jnp.float64)
        ddp = DistributedDataParallel(params)
        assert {bucket.dtype for bucket in ddp.plan.buckets} == {"float64"}
        grads = pair(lambda p, b: ddp.value_and_grad(loss_fn)(p, b)[1], params, batch)
        assert_all_close(grads, oracle(loss_fn, params, batch, 2))


@pytest.mark.parametrize(("mapping", "strategy"), [("checked", "flat"), ("vmap", "tuple")])
def test_complex_parameters(mapping: str, strategy: Any) -> None:
    params = {"a": jnp.array([1 + 2j, 3 - 1j]), "b": jnp.array([[0.5j]]), "real": jnp.array([2.0])}
    batch = jnp.arange(8.0) * (1 - 0.5j)
    ddp = DistributedDataParallel(params, strategy=strategy)

    def loss(p: Any, x: Any) -> Any:
        return jnp.mean(jnp.abs(p["a"][0] * x + p["a"][1] * x**2 + p["b"][0, 0]) ** 2) * p["real"][0]

    grads = Replicas(mapping, 2)(lambda p, x: ddp.value_and_grad(loss)(p, x)[1], params, batch)
    assert_all_close(grads, oracle(loss, params, batch, 2))


def test_holomorphic(pair: Replicas) -> None:
    params, batch = {"a": jnp.array([1 + 2j, 3 - 1j])}, jnp.arange(8.0) * (1 - 0.5j)
    ddp = DistributedDataParallel(params)

    def loss(p: Any, x: Any) -> Any:
        return jnp.mean(p["a"][0] * p["a"][1] * x)

    grads = pair(lambda p, x: ddp.value_and_grad(loss, holomorphic=True)(p, x)[1], params, batch)
    want = mean_of([jax.grad(loss, holomorphic=True)(params, shard) for shard in shards(batch, 2)])
    assert_all_close(grads, want)


def test_loss_that_is_reduced_already_gives_no_factor(replicas: Replicas) -> None:
    params, batch = make_params(), make_batch()
    ddp = DistributedDataParallel(params)

    def step(params: Any, batch: Any) -> Any:
        loss, grads = ddp.value_and_grad(lambda p, b: ddp.mean(loss_fn(p, b)))(params, batch)
        return loss, grads  # the loss is replicated by type, as the loss function returned it

    assert_all_close(replicas(step, params, batch)[1], oracle(loss_fn, params, batch, replicas.size))


def test_loss_with_statistics_over_all_replicas(replicas: Replicas) -> None:
    """Synchronised batch norm: the gradient of the mean of losses that depend on all replicas' data."""
    params, batch = make_params(), make_batch()
    ddp = DistributedDataParallel(params)

    def loss(params: Any, batch: Any, mean: Any) -> Any:
        hidden = batch["x"] @ params["dense1"]["kernel"]
        return jnp.mean((hidden - mean(hidden.mean(0))) ** 2) * params["scale"]

    def step(params: Any, batch: Any) -> Any:
        return ddp.value_and_grad(lambda p, b: loss(p, b, ddp.mean))(params, batch)[1]

    def whole(params: Any) -> Any:
        pieces = shards(batch, replicas.size)
        means = [(b["x"] @ params["dense1"]["kernel"]).mean(0) for b in pieces]
        return jnp.mean(jnp.stack([loss(params, b, lambda _: jnp.mean(jnp.stack(means), 0)) for b in pieces]))

    assert_all_close(replicas(step, params, batch), jax.tree.map(np.asarray, jax.grad(whole)(params)), 1e-4)


def test_all_reduce_of_gradients_taken_by_hand(replicas: Replicas) -> None:
    params, batch = make_params(), make_batch()
    ddp = DistributedDataParallel(params)

    def step(params: Any, batch: Any) -> Any:
        return ddp.all_reduce(jax.grad(loss_fn)(ddp.varying(params), batch))

    assert_all_close(replicas(step, params, batch), oracle(loss_fn, params, batch, replicas.size))


@pytest.mark.parametrize(("check_vma", "strategy"), [(True, "flat"), (False, "tuple")])
def test_mesh_with_a_model_axis(check_vma: bool, strategy: Any) -> None:
    params, batch = make_params(), make_batch()
    ddp = DistributedDataParallel(params, strategy=strategy)

    def step(params: Any, batch: Any) -> Any:
        return ddp.value_and_grad(loss_fn)(params, batch)[1]

    mapped = jax.shard_map(
        step, mesh=mesh(2, "data", 2, "model"), in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma
    )
    grads = jax.tree.map(lambda g: np.asarray(g)[None], jax.jit(mapped)(params, batch))
    assert_all_close(grads, oracle(loss_fn, params, batch, 2))


def test_mesh_with_explicit_axes() -> None:
    """As jax.make_mesh makes them by default: arrays carry their sharding, and shard_map takes it from them."""
    params, batch = make_params(), make_batch()
    ddp = DistributedDataParallel(params)
    explicit = jax.make_mesh((2,), ("data",), devices=jax.devices("cpu")[:2], axis_types=(AxisType.Explicit,))
    with jax.set_mesh(explicit):
        params = jax.device_put(params, NamedSharding(explicit, P()))
        placed = jax.device_put(batch, NamedSharding(explicit, P("data")))
        step = jax.shard_map(lambda p, b: ddp.value_and_grad(loss_fn)(p, b)[1], out_specs=P())
        grads = jax.tree.map(lambda g: np.asarray(g)[None], jax.jit(step)(params, placed))
    assert_all_close(grads, oracle(loss_fn, make_params(), batch, 2))


@pytest.mark.parametrize("strategy", ["flat", "tuple"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_params_split_over_the_model_axis(check_vma: bool, strategy: Any) -> None:
    """Each model shard has its own columns; their gradients stay its own and are averaged over data only."""
    kernel, x = jax.random.normal(jax.random.key(0), (3, 4)), make_batch()["x"]
    ddp = DistributedDataParallel({"kernel": jax.ShapeDtypeStruct((3, 2), jnp.float32)}, strategy=strategy)

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(jnp.sum(jnp.tanh(x @ params["kernel"]), axis=1))

    def step(params: Any, x: Any) -> Any:
        return ddp.value_and_grad(loss)(params, x)[1]

    split = P(None, "model")
    mapped = jax.shard_map(
        step, mesh=mesh(2, "data", 2, "model"), in_specs=(split, P("data")), out_specs=split, check_vma=check_vma
    )
    grads = jax.jit(mapped)({"kernel": kernel}, x)
    assert_all_close({"kernel": np.asarray(grads["kernel"])[None]}, oracle(loss, {"kernel": kernel}, x, 2))


@pytest.mark.parametrize("check_vma", [True, False])
def test_data_over_two_axes(check_vma: bool) -> None:
    params, batch = make_params(), make_batch()
    ddp = DistributedDataParallel(params, axis_name=("host", "device"))
    assert ddp.axis_name == ("host", "device")

    def step(params: Any, batch: Any) -> Any:
        return ddp.value_and_grad(loss_fn)(params, batch)[1]

    split = P(("host", "device"))
    mapped = jax.shard_map(
        step, mesh=mesh(2, "host", 2, "device"), in_specs=(P(), split), out_specs=P(), check_vma=check_vma
    )
    grads = jax.tree.map(lambda g: np.asarray(g)[None], jax.jit(mapped)(params, batch))
    assert_all_close(grads, oracle(loss_fn, params, batch, 4))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axes", [("device", "replica"), "replica"])
def test_vmapped_axis_inside_a_device_axis(axes: Any, check_vma: bool) -> None:
    """Several replicas a device."""
    params, batch = make_params(), make_batch()
    ddp = DistributedDataParallel(params, axis_name=axes)

    def step(params: Any, batch: Any) -> Any:
        return ddp.value_and_grad(loss_fn)(params, batch)[1]

    def on_device(params: Any, batch: Any) -> Any:
        halves = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), batch)
        return jax.vmap(step, in_axes=(None, 0), out_axes=None, axis_name="replica")(params, halves)

    split = P("device") if len(ddp.axis_name) == 2 else P()
    mapped = jax.shard_map(on_device, mesh=mesh(2, "device"), in_specs=(P(), split), out_specs=P(), check_vma=check_vma)
    if check_vma:
        with pytest.raises(AxisError, match=r"'replica', an axis of jax\.vmap inside a shard_map over 'device'"):
            jax.jit(mapped)(params, batch)
        return
    grads = jax.tree.map(lambda g: np.asarray(g)[None], jax.jit(mapped)(params, batch))
    assert_all_close(grads, oracle(loss_fn, params, batch, 2 * len(ddp.axis_name)))


def test_remat_and_scan_over_layers(pair: Replicas) -> None:
    params = {"layers": jax.random.normal(jax.random.key(0), (3, 4, 4))}
    batch = jax.random.normal(jax.random.key(1), (4, 4))
    ddp = DistributedDataParallel(params)

    def loss(params: Any, x: Any) -> Any:
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
        # The first layer is outside the scan: a carry must vary over the axis from the start where types are checked.
        x, _ = lax.scan(layer, jnp.tanh(x @ params["layers"][0]), params["layers"][1:])
        return jnp.mean(x**2)

    grads = pair(lambda p, b: ddp.value_and_grad(loss)(p, b)[1], params, batch)
    assert_all_close(grads, oracle(loss, params, batch, 2))


def _ddp(strategy: Any = None) -> DistributedDataParallel:
    return DistributedDataParallel({"w": jnp.ones(2)}, strategy=strategy)


def test_mean_of_metrics(pair: Replicas) -> None:
    metrics = {"loss": jnp.array([1.0, 3.0]), "hits": jnp.array([1, 2]), "right": jnp.array([True, False])}

    def step(_: Any, local: Any) -> Any:
        return _ddp().mean(local | {"examples": 8})

    got = pair(step, None, metrics)
    assert {name: value.reshape(2).tolist() for name, value in got.items()} == {
        "loss": [2, 2],
        "hits": [1.5, 1.5],
        "right": [0.5, 0.5],
        "examples": [8, 8],
    }
