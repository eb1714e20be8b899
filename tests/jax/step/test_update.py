"""What the optimizer sees of a step, and what it leaves alone; states that are another optimizer's."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax_cases import loss_fn, make_params
from step_cases import RATE, assert_same, batches, line_search_steps, make_step, plain_steps, run

from unified_ddp import MisuseError

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


LINE_SEARCHES = {
    "lbfgs": optax.lbfgs(),
    "backtracking": optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(10, store_grad=True)),
    "backtracking without gradients": optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(10)),
    "polyak": optax.polyak_sgd(),
}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lbfgs", {}),
        ("lbfgs", {"accumulate": 2, "strategy": "flat"}),
        ("lbfgs", {"trainable": lambda name: name != "scale", "on_nonfinite": "skip"}),
        ("backtracking", {}),
        ("backtracking without gradients", {}),
        ("polyak", {}),
    ],
)
def test_line_searches_see_the_loss_of_all_replicas(name: str, options: dict[str, Any]) -> None:
    params, data, optimizer = make_params(), batches(3), LINE_SEARCHES[name]
    state, losses = run(make_step(params, loss_fn, 2, optimizer, **options), params, data)
    held = {"scale": params["scale"]} if "trainable" in options else {}
    rest = {key: value for key, value in params.items() if key not in held}
    want, want_losses = line_search_steps(lambda p, b: loss_fn(p | held, b), rest, optimizer, data, 2)
    assert_same({key: state.params[key] for key in rest}, want, 1e-3)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-3)


def test_a_line_search_draws_the_noise_of_the_step() -> None:
    """And sees its buffers and weights: on one replica, every value is that of plain optax."""

    def loss(params: Any, batch: Any, rng: Any, buffers: Any) -> Any:
        noisy = {"x": batch["x"] + 0.1 * jax.random.normal(rng, batch["x"].shape), "y": batch["y"]}
        each = jax.vmap(lambda x, y: loss_fn(params, {"x": x[None], "y": y[None]}))(noisy["x"], noisy["y"])
        return each + buffers, buffers + 1

    params, [batch], rng = make_params(), batches(1), jax.random.key(2)
    weight = np.array([1, 0, 2, 1, 0, 0, 1, 1], np.float32)
    step = make_step(params, loss, 1, optax.lbfgs())
    state, _ = run(step, params, [batch], jnp.float32(3), rng=rng, weight=weight)
    own = jax.random.fold_in(jax.random.fold_in(rng, 0), 0)

    def plain(params: Any, batch: Any) -> Any:
        return jnp.sum(weight * loss(params, batch, own, 3.0)[0]) / weight.sum()

    want, _ = line_search_steps(plain, params, optax.lbfgs(), [batch], 1)
    assert_same(state.params, want, 1e-3)
    assert state.buffers == 4


def _update(updates: Any, state: Any, params: Any = None, *, loss_fn: Any, **_: Any) -> Any:
    return updates, state


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (optax.GradientTransformationExtraArgs(lambda _: (), _update), "missing 1 .* argument: 'loss_fn'"),
        (optax.contrib.sophia(0.1), "obj_fn must be provided"),
    ],
)
def test_an_optimizer_that_asks_for_more(optimizer: Any, message: str) -> None:
    params, [batch] = make_params(), batches(1)
    step = make_step(params, loss_fn, 2, optax.chain(optimizer, optax.sgd(0.1)))
    with pytest.raises(MisuseError, match=f"more than train_step has to give it, which is value, .*: .*{message}"):
        step(step.init(params), batch)


@pytest.mark.parametrize(
    ("optimizer", "trainable", "message"),
    [
        (optax.sgd(0.1), None, r"opt_state\[0\]\.count is int32\[\], where the optimizer has nothing"),
        (optax.amsgrad(0.1), None, r"opt_state\[0\]\.nu_max\['dense1'\]\['bias'\] is absent"),
        (optax.adam(0.1), lambda name: name != "scale", r"\.mu\['scale'\] is float32\[\], where .* has nothing"),
        (optax.adam(0.1, mu_dtype=jnp.bfloat16), None, r"is float32\[.*\], where the optimizer has bfloat16\["),
    ],
)
def test_a_state_of_another_optimizer(optimizer: Any, trainable: Any, message: str) -> None:
    params, [batch] = make_params(), batches(1)
    state = make_step(params, loss_fn, 2, optax.adam(0.1)).init(params)
    before = jax.tree.map(np.array, state)
    step = make_step(params, loss_fn, 2, optimizer, trainable=trainable, donate=True)
    with pytest.raises(MisuseError, match=f"{message}.*Make the state with init of this very step"):
        step(state, batch)
    assert jax.tree.all(jax.tree.map(np.array_equal, before, state))


def test_a_state_of_other_containers() -> None:
    params, [batch] = make_params(), batches(1)
    step = make_step(params, loss_fn, 2, optax.sgd(0.1))
    state = step.init(params)
    with pytest.raises(MisuseError, match=r"opt_state is built as PyTreeDef\(\(\)\), and the optimizer's as "):
        step(dataclasses.replace(state, opt_state=()), batch)
