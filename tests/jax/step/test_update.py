"""What the optimizer sees of a step, and what it leaves alone."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax_cases import loss_fn, make_params
from step_cases import RATE, assert_same, batches, make_step, plain_steps, run

pytestmark = pytest.mark.timeout(120)


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


def test_clipping_comes_after_the_reduction() -> None:
    params, data = make_params(), batches()
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0))
    state, _ = run(make_step(params, loss_fn, 4, optimizer), params, data)
    want, _ = plain_steps(loss_fn, params, optimizer, data, 4)
    assert_same(state.params, want)
