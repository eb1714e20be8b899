"""PRNG keys among the buffers, such as those that flax nnx draws dropout from: every replica has its own."""

from typing import Any

import jax
import jax.numpy as jnp

from unified_ddp.jax.pytrees.schema import is_key


def fold_in_keys(tree: Any, number: jax.Array) -> Any:
    """Returns the tree with a number folded into every key."""

    def fold(leaf: Any) -> Any:
        if not is_key(leaf):
            return leaf
        folded = jax.vmap(jax.random.fold_in, in_axes=(0, None))(leaf.reshape(-1), number)
        return folded.reshape(leaf.shape)

    return jax.tree.map(fold, tree)


def kept_keys(given: Any, after: Any, stored: Any) -> Any:
    """Returns the buffers after a step, in which keys that came back as they were given are those that were stored."""

    def keep(before: Any, now: Any, kept: Any) -> Any:
        if not is_key(now):
            return now
        same = jax.random.key_data(before) == jax.random.key_data(now)
        return jnp.where(jnp.all(same, axis=-1), kept, now)

    return jax.tree.map(keep, given, after, stored)
