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

__all__ = ["axis_names", "axis_size", "mark_varying", "missing_axes", "psum", "require_axes"]


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
            raise AxisError(_message(name, what)) from error


def axis_size(names: Sequence[str]) -> int:
    """Returns the number of replicas: the product of the sizes of the axes, which must be in scope."""
    return math.prod(lax.axis_size(name) for name in names)


def missing_axes(value: Any, names: Sequence[str]) -> tuple[str, ...]:
    """Returns the axes over which the value's type says that it is the same everywhere; () where types say nothing."""
    varying = _varying(value)
    return tuple(name for name in names if name not in varying and _is_checked(name))


def psum(values: Sequence[jax.Array], names: Sequence[str]) -> list[jax.Array]:
    """Returns the sums over the axes, in one collective; typed as replicated where types are checked."""
    checked = tuple(name for name in names if _is_checked(name))
    others = tuple(name for name in names if name not in checked)
    sums = list(values)
    for group in (others, checked):  # JAX refuses to mix them: a vmapped axis inside a checked shard_map has no type
        if group and sums:
            sums = list(lax.psum(sums, group))
    return sums


def mark_varying(tree: Any, names: Sequence[str]) -> Any:
    """Returns the tree with every array typed as varying over the axes, where the mapped function checks that."""
    checked = tuple(name for name in names if _is_checked(name))
    return jax.tree.map(lambda leaf: _mark(leaf, checked), tree) if checked else tree


def _mark(leaf: Any, checked: Sequence[str]) -> Any:
    if not (hasattr(leaf, "dtype") or isinstance(leaf, int | float | complex)):
        return leaf
    missing = tuple(name for name in checked if name not in _varying(leaf))
    return lax.pcast(leaf, missing, to="varying") if missing else leaf  # pcast refuses what varies already


def _varying(value: Any) -> frozenset[str]:
    kind = getattr(jax.typeof(value), "manual_axis_type", None)
    return frozenset(kind.varying) if kind is not None else frozenset()


def _is_checked(name: str) -> bool:
    # The index along an axis varies over it by definition, so its type tells whether types are kept for this axis.
    return name in _varying(lax.axis_index(name))


def _message(name: str, what: str) -> str:
    scope = _axes_in_scope()
    if scope is None:
        have = f"the axis '{name}' is not in scope here"
    elif scope:
        have = f"the mapped axes in scope here are {', '.join(map(repr, scope))}"
    else:
        have = "no mapped axis is in scope here"
    other = f", or construct DistributedDataParallel with axis_name={scope[0]!r}" if scope else ""
    return (
        f"DistributedDataParallel.{what} needs the mapped axis '{name}', but {have}. Call it inside jax.shard_map over "
        f"a mesh with the axis '{name}', or inside jax.pmap or jax.vmap with axis_name='{name}'{other}."
    )


def _axes_in_scope() -> tuple[str, ...] | None:
    try:  # there is no public way to list them; the message can do without
        from jax._src.core import get_axis_env

        return tuple(str(name) for name in get_axis_env().axis_sizes)
    except (ImportError, AttributeError):
        return None
