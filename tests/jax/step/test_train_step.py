"""Whole steps against plain ones: gradients are the oracle, and the optimizer sees them."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax_cases import loss_fn, make_batch, make_params
from step_cases import assert_same, batches, make_step, plain_steps, run

pytestmark = pytest.mark.timeout(120)


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


@pytest.mark.parametrize("donate", [False, True])
def test_donation(donate: bool) -> None:
    params = make_params()
    step = make_step(params, loss_fn, 2, donate=donate)
    old = step.init(params)
    step(old, make_batch())
    assert old.params["scale"].is_deleted() == donate
    assert not params["scale"].is_deleted()


def test_what_a_step_takes() -> None:
    params = make_params()
    step = make_step(params, loss_fn, 2)
    with pytest.raises(TypeError, match="takes the state that init or the step before returned, not dict"):
        step(params, make_batch())
    with pytest.raises(TypeError, match=r"is jitted already.*call it outside jax\.jit"):
        jax.jit(step)(step.init(params), make_batch())
