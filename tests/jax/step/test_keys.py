"""Keys among the buffers: every replica draws its own noise from them, and they stay in the state as they were."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax_cases import make_batch
from step_cases import assert_same, make_step, run

pytestmark = pytest.mark.timeout(120)


class Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0, dropout=jax.random.split(jax.random.key(1), 2)[1])
        self.hidden, self.out = nnx.Linear(3, 8, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.out(self.dropout(jnp.tanh(self.hidden(x))))


GRAPHDEF, PARAMS, BUFFERS = nnx.split(Net(), nnx.Param, ...)


def loss(params: Any, batch: Any, buffers: Any) -> Any:
    model = nnx.merge(GRAPHDEF, params, jax.tree.map(lambda leaf: leaf, buffers))  # made here, changed here
    value = jnp.mean((model(batch["x"]) - batch["x"].sum(1, keepdims=True)) ** 2)
    return value, nnx.split(model, nnx.Param, ...)[2]


def _folded(buffers: Any, replica: int) -> Any:
    """As a user would for one replica."""

    def fold(leaf: Any) -> Any:
        return jax.random.fold_in(leaf, replica) if _is_key(leaf) else leaf

    return jax.tree.map(fold, buffers)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_dropout_of_nnx_differs_by_replica(accumulate: int) -> None:
    step = make_step(PARAMS, loss, 2, optax.sgd(0.1), accumulate=accumulate)
    batches = [{"x": make_batch(16)["x"][8 * i : 8 * i + 8]} for i in range(2)]
    state, _ = run(step, PARAMS, batches, BUFFERS)
    params, buffers = PARAMS, BUFFERS
    for batch in batches:
        grads = []
        for replica, rows in enumerate(np.split(np.asarray(batch["x"]), 2)):
            own = _folded(buffers, replica)
            for part in np.split(rows, accumulate):
                (_, own), grad = jax.value_and_grad(loss, has_aux=True)(params, {"x": part}, own)
                grads.append(grad)
        mean = jax.tree.map(lambda *each: sum(each) / len(each), *grads)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, mean)
        buffers = jax.tree.map(lambda new, old: old if _is_key(old) else new, own, buffers)
    assert_same(state.params, params, 1e-4)
    for got, want in zip(jax.tree.leaves(state.buffers), jax.tree.leaves(buffers), strict=True):
        assert jnp.array_equal(*(jax.random.key_data(x) if _is_key(x) else x for x in (got, want)))


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def test_a_key_that_the_loss_replaces_is_that_of_replica_0() -> None:
    def loss(params: Any, batch: Any, buffers: Any) -> Any:
        keys = jax.vmap(lambda key: jax.random.split(key)[0])(buffers["keys"])
        return params["w"] * batch["x"].mean(), {"keys": keys}

    keys, params = jax.random.split(jax.random.key(3), 3), {"w": jnp.float32(1)}
    state, _ = run(make_step(params, loss, 2), params, [make_batch()] * 2, {"keys": keys})
    for _ in range(2):
        keys = jnp.stack([jax.random.split(jax.random.fold_in(key, 0))[0] for key in keys])
    assert jnp.array_equal(jax.random.key_data(state.buffers["keys"]), jax.random.key_data(keys))
