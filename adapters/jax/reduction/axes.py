"""Mapped axes: whether they are in scope, how large they are, and which values vary over them.

Under `jax.shard_map(check_vma=True)` the type of a value says over which axes it varies, and differentiating with
respect to a value that does not vary sums over the axis. Elsewhere (`check_vma=False`, `pmap`, `vmap`) types say
nothing and gradients are local. Everything that depends on the version of JAX is in this file.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from unified_ddp.errors import AxisError
from unified_ddp.jax.pytrees.schema import is_array


def axis_names(axis_name: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the axis names as a tuple.

    Raises:
        TypeError: a name is no string.
        ValueError: no name is given, or one is given twice.
    """
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"axis_name takes a string or a tuple of strings, not {axis_name!r}")
    if not names or len(set(names)) != len(names):
        raise ValueError(f"axis_name takes one or more different names, not {axis_name!r}")
    return names


def require_axes(names: Sequence[str], what: str) -> None:
    """Raises AxisError unless every axis is mapped where the call is traced; `what` names the caller."""
    for name in names:
        try:
            lax.axis_size(name)
        except NameError as error:
            raise AxisError(_unmapped(name, what)) from error
    for name in names:
        # psum of JAX 0.10 then wants to type its operand as varying over the vmapped axis, and stops at an assertion.
        if not _is_checked(name) and (checked := sorted(checked_axes(_axes_in_scope() or ()))):
            raise AxisError(
                f"DistributedDataParallel.{what} cannot reduce over '{name}', an axis of jax.vmap inside a shard_map "
                f"over '{checked[0]}' with check_vma=True: JAX has no collectives for it there. Pass check_vma=False "
                f"to shard_map, or make '{name}' an axis of its mesh."
            )


def replica_count(names: Sequence[str]) -> int:
    """Returns the number of replicas: the product of the sizes of the axes, which must be in scope."""
    return math.prod(lax.axis_size(name) for name in names)


def checked_axes(names: Sequence[str]) -> frozenset[str]:
    """Returns those of the axes over which types say whether a value varies."""
    return frozenset(name for name in names if _is_checked(name))


def varying_axes(value: Any) -> frozenset[str]:
    """Returns the axes over which the value's type says that it varies; empty where types say nothing."""
    kind = getattr(jax.typeof(value), "manual_axis_type", None)
    return frozenset(kind.varying) if kind is not None else frozenset()


def mark_varying(tree: Any, names: Sequence[str]) -> Any:
    """Returns the tree with every array typed as varying over the axes, where the mapped function checks that."""
    checked = checked_axes(names)
    return jax.tree.map(lambda leaf: _mark(leaf, checked), tree) if checked else tree


def _mark(leaf: Any, checked: frozenset[str]) -> Any:
    if not is_array(leaf):
        return leaf
    missing = checked - varying_axes(leaf)
    return lax.pcast(leaf, tuple(sorted(missing)), to="varying") if missing else leaf  # refuses what varies already


def _is_checked(name: str) -> bool:
    # The index along an axis varies over it by definition, so its type tells whether types are kept for this axis.
    return name in varying_axes(lax.axis_index(name))


def _unmapped(name: str, what: str) -> str:
    scope = _axes_in_scope()
    named = [axis for axis in scope or () if not axis.startswith(_UNNAMED)]
    if scope is None:
        have = f"the axis '{name}' is not in scope here"
    elif named:
        have = f"the mapped axes in scope here are {', '.join(map(repr, named))}"
    elif scope:
        have = "no mapped axis in scope here has a name"
    else:
        have = "no mapped axis is in scope here"
    other = f", or construct DistributedDataParallel with axis_name={named[0]!r}" if named else ""
    return (
        f"DistributedDataParallel.{what} needs the mapped axis '{name}', but {have}. Call it inside jax.shard_map over "
        f"a mesh with the axis '{name}', or inside jax.pmap or jax.vmap with axis_name='{name}'{other}."
    )


_UNNAMED = "_internal_pmap"
"""How JAX's own name for the axis of a pmap without axis_name begins."""


def _axes_in_scope() -> tuple[str, ...] | None:
    try:  # there is no public way to list them; the message can do without
        from jax._src.core import get_axis_env

        return tuple(str(name) for name in get_axis_env().axis_sizes)
    except (ImportError, AttributeError):
        return None
