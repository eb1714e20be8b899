"""Pytrees as parameter schemas: which leaves are parameters, and what they are called."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unified_ddp.errors import PlanError
from unified_ddp.plan import ParamSpec

CACHE_SIZE = 256


@dataclasses.dataclass(frozen=True, eq=False)  # compared by identity: `schema_of` gives equal trees one schema
class Schema:
    """The parameters of one kind of pytree.

    Attributes:
        treedef: of the whole tree.
        specs: one for each leaf that can have a gradient, in tree order.
        leaves: the positions of those leaves among all leaves of the tree.
        skipped: names and dtypes of the other leaves.
    """

    treedef: jax.tree_util.PyTreeDef
    specs: tuple[ParamSpec, ...]
    leaves: tuple[int, ...]
    skipped: dict[str, str]


def param_specs(tree: Any) -> list[ParamSpec]:
    """Returns the parameters of a pytree, in tree order.

    Names are the tree's path joined with dots, such as "conv1.kernel"; the trailing ".value" of flax's variables is
    left out. Leaves that cannot have gradients (integers, bools, PRNG keys, anything that is no array) are skipped.

    Args:
        tree: any pytree of arrays, numbers or `jax.ShapeDtypeStruct`s.

    Raises:
        PlanError: a dtype is unknown to the core, or two leaves have the same name.
    """
    return list(schema_of(tree).specs)


def schema_of(tree: Any) -> Schema:
    """Returns the tree's schema, the same object for every tree of equal treedef, shapes and dtypes."""
    leaves, treedef = jax.tree.flatten(tree)
    key = (treedef, tuple(_aval(leaf) for leaf in leaves))
    try:
        schema = _schemas.get(key)
    except TypeError:  # static data in the treedef is not hashable
        return _build(tree)
    if schema is None:
        if len(_schemas) >= CACHE_SIZE:
            _schemas.pop(next(iter(_schemas)))
        schema = _schemas[key] = _build(tree)
    return schema


_schemas: dict[Any, Schema] = {}


@functools.lru_cache(maxsize=CACHE_SIZE)
def without(schema: Schema, names: frozenset[str]) -> Schema:
    """Returns the schema with the parameters of these names among those that are skipped."""
    kept = [(s, leaf) for s, leaf in zip(schema.specs, schema.leaves, strict=True) if s.name not in names]
    skipped = schema.skipped | {spec.name: f"frozen {spec.dtype}" for spec in schema.specs if spec.name in names}
    return Schema(schema.treedef, tuple(s for s, _ in kept), tuple(leaf for _, leaf in kept), skipped)


def _build(tree: Any) -> Schema:
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    specs, leaves, skipped, seen = [], [], {}, set[str]()
    for position, (path, leaf) in enumerate(paths):
        name, (shape, dtype) = leaf_name(path), _aval(leaf)
        if name in seen:
            raise PlanError(f"two leaves of the pytree are named '{name}'; rename one of the keys on its path")
        seen.add(name)
        if _has_gradient(dtype):
            specs.append(ParamSpec(name, shape, str(dtype)))
            leaves.append(position)
        else:
            skipped[name] = str(dtype) if dtype is not None else type(leaf).__name__
    return Schema(treedef, tuple(specs), tuple(leaves), skipped)


def _aval(leaf: Any) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype as JAX would hold them; dtype None if the leaf is no array."""
    if isinstance(leaf, bool | int | float | complex):
        return (), jnp.result_type(leaf)
    dtype = getattr(leaf, "dtype", None)
    shape = getattr(leaf, "shape", None)
    if dtype is None or shape is None:
        return (), None
    if jnp.issubdtype(dtype, jax.dtypes.extended) or dtype == jax.dtypes.float0:
        return tuple(shape), dtype
    return tuple(shape), jnp.result_type(dtype)  # float64 is float32 to JAX unless x64 is on


def _has_gradient(dtype: Any) -> bool:
    return isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, np.inexact)


def leaf_name(path: Sequence[Any]) -> str:
    """Returns the name of the leaf at a path of the tree, see `param_specs`."""
    # flax's Variable and its metadata boxes hold their array as the attribute `value`.
    if len(path) > 1 and path[-1] == jax.tree_util.GetAttrKey("value"):
        path = path[:-1]
    return jax.tree_util.keystr(tuple(path), simple=True, separator=".") or "param"
