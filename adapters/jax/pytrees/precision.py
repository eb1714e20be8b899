"""Floating-point types that users choose: for the loss function, or for the reduction."""

from typing import Any

import jax
import jax.numpy as jnp


def floating_dtype(argument: str, dtype: Any) -> Any:
    """Returns the dtype, or None for None; raises ValueError naming the argument unless it is a floating-point one."""
    if dtype is None:
        return None
    if not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        raise ValueError(f"{argument} takes a floating-point type, such as jnp.bfloat16, not {dtype!r}")
    return jnp.dtype(dtype)


def cast_floating(tree: Any, dtype: Any) -> Any:
    """Returns the tree with its floating-point arrays in a dtype; None leaves them as they are."""
    if dtype is None:
        return tree

    def cast(leaf: Any) -> Any:
        floating = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(dtype) if floating else leaf

    return jax.tree.map(cast, tree)
