"""Pytrees as parameter schemas: which leaves are parameters, and what they are called."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unified_ddp.errors import PlanError
from unified_ddp.plan import ParamSpec


def param_specs(tree: Any) -> list[ParamSpec]:
    """Returns the parameters of a pytree, in tree order.

    Names are the tree's path joined with dots, such as "conv1.kernel"; the trailing ".value" of flax's variables is
    left out. Leaves that cannot have gradients (integers, bools, PRNG keys, anything that is no array) are skipped.

    Args:
        tree: any pytree of arrays, numbers or `jax.ShapeDtypeStruct`s.

    Raises:
        PlanError: a dtype is unknown to the core, or two leaves have the same name.
    """
    return [spec for spec in named_leaves(tree).values() if isinstance(spec, ParamSpec)]


def named_leaves(tree: Any) -> dict[str, ParamSpec | str]:
    """Returns every leaf's spec by name, in tree order; of a leaf that cannot have a gradient, the kind in words.

    Raises:
        PlanError: as for `param_specs`.
    """
    found: dict[str, ParamSpec | str] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = leaf_name(path)
        if name in found:
            raise PlanError(f"two leaves of the pytree are named '{name}'; rename one of the keys on its path")
        dtype = _dtype(leaf)
        has_gradient = isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, np.inexact)
        found[name] = ParamSpec(name, jnp.shape(leaf), str(dtype)) if has_gradient else str(dtype)
    return found


def _dtype(leaf: Any) -> Any:
    """As JAX would hold the leaf; the name of its type if it is no array."""
    if not is_array(leaf):
        return type(leaf).__name__
    dtype = getattr(leaf, "dtype", None)
    if dtype is not None and (jnp.issubdtype(dtype, jax.dtypes.extended) or dtype == jax.dtypes.float0):
        return dtype
    return jnp.result_type(leaf if dtype is None else dtype)  # float64 is float32 to JAX unless x64 is on


def is_array(leaf: Any) -> bool:
    """Returns whether a leaf is an array, the shape and dtype of one, or a number that JAX takes for one."""
    return hasattr(leaf, "dtype") or isinstance(leaf, bool | int | float | complex)


def is_key(leaf: Any) -> bool:
    """Returns whether a leaf is an array of typed PRNG keys; raw ones are like any other integers."""
    return jnp.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.prng_key)


def leaf_name(path: Sequence[Any]) -> str:
    """Returns the name of the leaf at a path of the tree, see `param_specs`."""
    # flax's Variable and its metadata boxes hold their array as the attribute `value`.
    if len(path) > 1 and path[-1] == jax.tree_util.GetAttrKey("value"):
        path = path[:-1]
    return jax.tree_util.keystr(tuple(path), simple=True, separator=".") or "param"
