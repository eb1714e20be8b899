"""Pytrees as parameter schemas: which leaves are parameters, what they are called, where they lie in a plan."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unified_ddp.errors import PlanError
from unified_ddp.plan import BucketPlan, ParamSpec, plan_in_ready_order

__all__ = [
    "Schema",
    "floating_dtype",
    "frozen_names",
    "leaf_name",
    "param_specs",
    "plan_of",
    "positions_in",
    "schema_of",
    "without",
]

_CACHE_SIZE = 256


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
        if len(_schemas) >= _CACHE_SIZE:
            _schemas.pop(next(iter(_schemas)))
        schema = _schemas[key] = _build(tree)
    return schema


_schemas: dict[Any, Schema] = {}


@functools.lru_cache(maxsize=_CACHE_SIZE)
def without(schema: Schema, names: frozenset[str]) -> Schema:
    """Returns the schema with the parameters of these names among those that are skipped."""
    kept = [(s, leaf) for s, leaf in zip(schema.specs, schema.leaves, strict=True) if s.name not in names]
    skipped = schema.skipped | {spec.name: f"frozen {spec.dtype}" for spec in schema.specs if spec.name in names}
    return Schema(schema.treedef, tuple(s for s, _ in kept), tuple(leaf for _, leaf in kept), skipped)


def frozen_names(params: Any, trainable: Any | Callable[[str], bool] | None) -> frozenset[str]:
    """Returns the names of the parameters that are not to be trained.

    Args:
        params: the pytree.
        trainable: a pytree of bools that is a prefix of `params`, or a function that takes a name such as
            "conv1.kernel" and returns a bool; None trains all.

    Raises:
        TypeError: it is neither, or the function returns something else.
        ValueError: the structure of the pytree of bools does not fit `params`.
    """
    schema = schema_of(params)
    if trainable is None:
        return frozenset()
    flags = jax.tree.leaves(trainable)
    if flags and all(isinstance(flag, bool | np.bool_) for flag in flags):
        try:
            full = jax.tree.map(lambda flag, part: jax.tree.map(lambda _: flag, part), trainable, params)
        except ValueError as error:
            raise ValueError(f"trainable is a pytree of bools whose structure does not fit params: {error}") from error
        by_leaf = jax.tree.leaves(full)
        return frozenset(s.name for s, leaf in zip(schema.specs, schema.leaves, strict=True) if not by_leaf[leaf])
    if not callable(trainable):
        raise TypeError(f"trainable takes a pytree of bools or a function of a name, not {trainable!r}")
    answers = {spec.name: trainable(spec.name) for spec in schema.specs}
    for name, answer in answers.items():
        if not isinstance(answer, bool | np.bool_):
            raise TypeError(f"trainable takes a function that returns a bool, but it returned {answer!r} for {name!r}")
    return frozenset(name for name, answer in answers.items() if not answer)


@functools.lru_cache(maxsize=_CACHE_SIZE)
def plan_of(schema: Schema, caps: tuple[int, ...]) -> BucketPlan:
    """Returns the buckets of a schema, last leaves first; the same object for the same schema and caps (in bytes)."""
    return plan_in_ready_order(schema.specs, caps)


@functools.lru_cache(maxsize=_CACHE_SIZE)
def positions_in(plan: BucketPlan, schema: Schema) -> tuple[int, ...]:
    """Returns, for each parameter of the plan, the position of its leaf in trees of this schema.

    Raises:
        PlanError: names, shapes or dtypes differ; the first difference is named.
    """
    planned = {spec.name: spec for spec in plan.params}
    for spec in schema.specs:
        _require_same(spec, planned.get(spec.name))
    leaf_of = {spec.name: leaf for spec, leaf in zip(schema.specs, schema.leaves, strict=True)}
    for name in planned:
        if name not in leaf_of:
            dtype = schema.skipped.get(name)
            have = f"holds it as {dtype}, which has no gradient" if dtype else "has no such leaf"
            raise PlanError(
                f"the plan has the parameter '{name}', but the pytree {have}; "
                "give a pytree with the names of the plan, or plan again from this pytree"
            )
    return tuple(leaf_of[spec.name] for spec in plan.params)


def _require_same(spec: ParamSpec, planned: ParamSpec | None) -> None:
    if planned is None:
        raise PlanError(
            f"the pytree has the parameter '{spec.name}', which is not in the plan; give a pytree with the names of "
            "the plan (flax: the 'params' collection alone), or plan again from this pytree"
        )
    for what in ("shape", "dtype"):
        have, want = getattr(spec, what), getattr(planned, what)
        if have != want:
            raise PlanError(
                f"parameter '{spec.name}' has {what} {have} in the pytree and {want} in the plan; "
                "make them equal (pmap: plan from params without the leading replica axis), or plan again"
            )


def floating_dtype(argument: str, dtype: Any) -> Any:
    """Returns the dtype, or None for None; raises ValueError naming the argument unless it is a floating-point one."""
    if dtype is None:
        return None
    if not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        raise ValueError(f"{argument} takes a floating-point type, such as jnp.bfloat16, not {dtype!r}")
    return jnp.dtype(dtype)


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
