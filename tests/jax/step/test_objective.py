"""What the loss function gets, and is to return."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax_cases import loss_fn, make_batch, make_params
from step_cases import RATE, assert_same, batches, make_step, plain_steps, run

pytestmark = pytest.mark.timeout(120)


def _per_row(params: Any, batch: Any) -> Any:
    return jnp.ones(len(batch["x"])) * loss_fn(params, batch)


@pytest.mark.parametrize(
    ("loss", "options", "arguments", "buffers", "message"),
    [
        (_per_row, {}, {}, None, r"returned a loss of shape \(4,\); return the mean over the batch, or pass weight="),
        (loss_fn, {}, {"weight": np.ones(8)}, None, r"a weight of shape \(4,\) a microbatch, the loss must have that"),
        (
            lambda p, b: (_per_row(p, b), 1.0),
            {"has_aux": True},
            {"weight": np.ones(8)},
            None,
            r"each leaf of aux must have that shape, one value for each row, but it has shape \(\); leave",
        ),
        (loss_fn, {"has_aux": True}, {}, None, r"is to return \(loss, aux\), but it returned one"),
        (
            lambda p, b: (loss_fn(p, b), {}),
            {},
            {},
            None,
            r"the loss alone, but it returned 2 values; has_aux=True is for metrics, init takes the buffers",
        ),
        (lambda p, b, buffers: loss_fn(p, b), {}, {}, jnp.ones(2), r"is to return \(loss, buffers\)"),
        (
            lambda p, b, buffers: (loss_fn(p, b), buffers),
            {"has_aux": True},
            {},
            jnp.ones(2),
            r"is to return \(loss, buffers, aux\), but it returned 2 values",
        ),
        (
            lambda p, b, buffers: (loss_fn(p, b), buffers[:1]),
            {},
            {},
            jnp.ones(2),
            r"buffers of another structure, shape or dtype .*float32\[2\].* became .*float32\[1\]",
        ),
    ],
)
def test_what_the_loss_function_returns(loss: Any, options: Any, arguments: Any, buffers: Any, message: str) -> None:
    params = make_params()
    step = make_step(params, loss, 2, **options)
    with pytest.raises(TypeError, match=message):
        step(step.init(params, buffers), make_batch(), **arguments)


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
