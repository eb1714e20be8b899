"""train_step with comm hooks that have state: the numbers of the same hook on the host, however the step is made."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax_cases import mesh
from step_cases import assert_same, hook_batch, hook_params, hook_wants, linear_loss, make_step
from support.hook_cases import BUCKET_BYTES, HOOKS

from unified_ddp.errors import MisuseError, NonFiniteError
from unified_ddp.hooks import AllReduce, TopK
from unified_ddp.jax import all_reduce_gradients
from unified_ddp.plan import MIB

pytestmark = pytest.mark.timeout(120)

STEPS = 3


def hook_step(hook: Any, size: int, **options: Any) -> Any:
    """A step of plain SGD from parameters of zero, whose gradients are the rows of the batch."""
    return make_step(
        hook_params(), linear_loss, size, optax.sgd(1.0), comm_hook=hook, bucket_cap_mb=BUCKET_BYTES / MIB, **options
    )


@pytest.mark.parametrize(
    ("name", "size", "options"),
    [
        ("powersgd late", 2, {}),
        ("powersgd", 4, {"accumulate": 2}),
        ("topk", 2, {"reduce_dtype": jnp.bfloat16}),
        ("topk", 4, {"trainable": lambda name: name != "dense1.kernel", "donate": True}),
        ("topk", 2, {"accumulate": 2, "on_nonfinite": "skip", "strategy": "flat"}),
    ],
)
def test_same_numbers_as_on_the_host(name: str, size: int, options: dict[str, Any]) -> None:
    hook = HOOKS[name][0]
    step, parts = hook_step(hook, size, **options), options.get("accumulate", 1)
    state = step.init(hook_params())
    for number in range(STEPS):
        old, (state, _) = state, step(state, hook_batch(number, size * parts))
        if options.get("donate"):
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old.hook_state))
        if number == 0 and size == 2:
            state = jax.tree.map(np.array, state)  # as a checkpoint restores it
    want = hook_wants(hook, size, STEPS, parts, options.get("trainable"), options.get("reduce_dtype"))
    assert_same(state.params, want, 1e-2 if "reduce_dtype" in options else 1e-4)
    for leaf in jax.tree.leaves(state.hook_state):
        assert leaf.shape[0] == size
        assert leaf.sharding.is_equivalent_to(NamedSharding(step.mesh, P("data")), leaf.ndim)


@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_state_is_unchanged_by_a_step_that_is_not_taken(policy: Any) -> None:
    step = hook_step(TopK(ratio=0.1, start_step=1), 2, on_nonfinite=policy)
    state, _ = step(step.init(hook_params()), hook_batch(0, 2))
    bad = hook_batch(1, 2)
    bad["scale"][1] = np.nan
    if policy == "raise":
        with pytest.raises(NonFiniteError, match="'scale' on replica 1"):
            step(state, bad)
        after = state
    else:
        after, _ = step(state, bad)
        assert int(after.skipped) == 1
        assert_same((after.params, after.hook_state), (state.params, state.hook_state), 0)
    after, _ = step(after, hook_batch(1, 2))
    assert_same(after.params, hook_wants(TopK(ratio=0.1, start_step=1), 2, 2), 1e-6)


def test_axes_of_the_mesh_that_hold_no_data() -> None:
    hook, devices = HOOKS["topk"][0], mesh(2, "data", 2, "model")
    step = hook_step(hook, 2, mesh=devices)
    state, _ = step(step.init(hook_params()), hook_batch(0, 2))
    assert_same(state.params, hook_wants(hook, 2, 1), 1e-6)


def test_a_hook_without_state_has_none() -> None:
    step = hook_step(AllReduce(), 2)
    state, _ = step(step.init(hook_params()), hook_batch(0, 2))
    assert state.hook_state is None
    assert_same(state.params, hook_wants(AllReduce(), 2, 1), 1e-6)


def test_the_optax_form_refuses_state() -> None:
    with pytest.raises(MisuseError, match=r"the comm hook TopK\(.*ratio=0.1.*\) has state .* train_step"):
        all_reduce_gradients(comm_hook=TopK(ratio=0.1)).init(hook_params())
    mean = all_reduce_gradients(comm_hook=AllReduce())
    state = mean.init(hook_params())
    step = jax.vmap(lambda grads: mean.update(grads, state)[0], axis_name="data")
    want = hook_wants(AllReduce(), 2, 1)
    assert_same(jax.tree.map(lambda g: -g[1], step(hook_batch(0, 2))), want, 1e-6)
