"""A replica's state of a comm hook, as steps take and return it: with or without a leading axis of replicas."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unified_ddp.errors import MisuseError
from unified_ddp.hooks.protocol import State


def local_states(initial: Sequence[State], given: Any) -> list[State]:
    """Returns this replica's states, without the axis of replicas that shard_map leaves with size 1.

    Args:
        initial: what the hook starts with, one a bucket.
        given: what the user passed as hook_state; None if nothing.

    Raises:
        MisuseError: there is none, though the hook has state, or it is another hook's or plan's.
    """
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(initial)]
    if given is None:
        if shapes:
            raise MisuseError(
                "the comm hook has state, which the step has to take and return: make it with "
                "ddp.init_hook_state(replicas), pass hook_state=... to value_and_grad or all_reduce, and keep what "
                "comes back for the next step"
            )
        given = list(initial)
    leaves = jax.tree.leaves(given)
    have = [jnp.shape(leaf) for leaf in leaves]
    treedef: Any = jax.tree.structure(list(initial))
    if jax.tree.structure(given) != treedef or any(h not in (w, (1, *w)) for h, w in zip(have, shapes, strict=True)):
        raise MisuseError(
            f"hook_state does not fit the comm hook and plan: it has arrays of shapes {have}, and {shapes} are needed "
            "on each replica. Make it with ddp.init_hook_state, and give shard_map the spec P(axis) for it"
        )
    return jax.tree.unflatten(treedef, [jnp.reshape(leaf, shape) for leaf, shape in zip(leaves, shapes, strict=True)])


def stacked_like(states: Sequence[State], given: Any) -> Any:
    """Returns the states with the shapes of those that the user passed; None if there were none."""
    if given is None:
        return None
    return jax.tree.map(lambda state, like: jnp.reshape(state, jnp.shape(like)), list(states), given)
