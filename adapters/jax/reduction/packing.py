"""Packing arrays into one flat array, and taking them out again, with little to compile."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from unified_ddp.jax.reduction.axes import varying_axes
from unified_ddp.plan import MIB

PACKED_BYTES = 8 * MIB
"""No more than this is packed into one array: of 2 to 25 MiB, 8 and 12 gave the fastest steps of a transformer, as the
same memory is used again. On GPUs, XLA's combiner puts such arrays together."""


def alike(arrays: Sequence[jax.Array]) -> list[list[int]]:
    """Returns the positions of those arrays that have one dtype and vary over the same axes by type, to be packed.

    Packed with one that varies over a model axis, a replicated array would come back as one that varies.
    """
    groups: dict[Any, list[int]] = {}
    for i, array in enumerate(arrays):
        groups.setdefault((array.dtype, varying_axes(array)), []).append(i)
    return list(groups.values())


class Turns:
    """Packs array after array, on CPUs no more than `PACKED_BYTES` at once: the next waits for the one before."""

    def __init__(self) -> None:
        self._last: jax.Array | None = None
        self._packed = 0

    def pack(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """Returns arrays that are `alike` as one flat array."""
        size = sum(array.nbytes for array in arrays)
        waits = self._packed + size > PACKED_BYTES
        self._packed = size if waits else self._packed + size
        return pack(arrays, after=self._last if waits else None)

    def reduced(self, flat: jax.Array) -> jax.Array:
        """Returns what it is given, which the next may wait for."""
        self._last = flat
        return flat


def pack(arrays: Sequence[jax.Array], after: jax.Array | None = None) -> jax.Array:
    """Returns arrays that are `alike` as one flat array.

    On CPUs they are packed once `after` has been computed, which is the all-reduce of what was packed before. Otherwise
    XLA merges all-reduces into one, for which everything has to be packed at once: of the 320 ms that a step of a
    transformer with 10.5 million parameters took, packing was then 26, most of it page faults, and is now 7.
    """
    pieces = [lax.reshape(array, (array.size,)) for array in arrays]
    filled = [i for i, piece in enumerate(pieces) if piece.size]
    if filled and after is not None and after.size and varying_axes(after) <= varying_axes(pieces[filled[0]]):
        smallest = min(filled, key=lambda i: pieces[i].size)
        pieces[smallest] = lax.platform_dependent(pieces[smallest], after, cpu=_wait, default=lambda piece, _: piece)
    return lax.concatenate(pieces, 0)


def _wait(piece: jax.Array, after: jax.Array) -> jax.Array:
    return jnp.where(_never(after), jnp.zeros_like(piece), piece)


def _never(flat: jax.Array) -> jax.Array:
    """False, but not for XLA, which would drop barriers too early: nothing is greater than infinity."""
    return lax.real(flat[0]) > jnp.inf if jnp.iscomplexobj(flat) else flat[0] > jnp.inf


def unpack(flat: jax.Array, like: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """Returns the pieces of a flat array in the shapes of `like`."""
    sizes = [array.size for array in like]
    if len(set(sizes)) == len(sizes) or not 0 < flat.size <= jnp.iinfo(jnp.int32).max:
        pieces = _slices(flat, sizes)
    else:
        by_offset, by_slice = (functools.partial(take, sizes=sizes) for take in (_slices_at_offsets, _slices))
        # On GPUs a conditional would be waited for, and compiling a slice costs nothing there.
        pieces = lax.platform_dependent(flat, cpu=by_offset, default=by_slice)
    return [lax.reshape(piece, array.shape) for piece, array in zip(pieces, like, strict=True)]


def _slices(flat: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    return [lax.slice(flat, (end - size,), (end,)) for size, end in zip(sizes, _ends(sizes), strict=True)]


def _slices_at_offsets(flat: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """Slices at offsets that XLA takes for unknown.

    XLA on CPU compiles a kernel for every slice, 10 to 30 ms each, as the offset is a constant in it. With offsets as
    operands, slices of one size (and the updates that XLA fuses with them) share one kernel: the step of an MLP with
    200 parameters compiled in 1.4 s, not 3.0, and in 1.3 with nothing packed. XLA propagates constants through
    arithmetic, barriers and loops, but not out of a conditional.
    """
    offsets = [end - size for size, end in zip(sizes, _ends(sizes), strict=True)]
    unknown = lax.cond(_never(flat), lambda: [jnp.int32(0)] * len(offsets), lambda: [jnp.int32(o) for o in offsets])
    return [
        lax.dynamic_slice(flat, (offset,), (size,), allow_negative_indices=False)
        for offset, size in zip(unknown, sizes, strict=True)
    ]


def _ends(sizes: Sequence[int]) -> list[int]:
    return list(itertools.accumulate(sizes))
