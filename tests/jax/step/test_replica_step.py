"""A replica's part of a step: microbatches, their keys, one reduction after them, buffers."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax_cases import loss_fn, make_batch, make_params
from step_cases import RATE, assert_same, batches, make_step, plain_steps, run

pytestmark = pytest.mark.timeout(120)


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
