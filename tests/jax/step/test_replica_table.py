"""Weights of rows: what is minimised, whichever replica has them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax_cases import loss_fn, make_batch, make_params
from step_cases import assert_same, batches, make_step, run

from unified_ddp.jax import pad_batch

pytestmark = pytest.mark.timeout(120)


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
