"""The operations of which hooks are made, in numpy's words; a framework says over again only what it does otherwise."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unified_ddp.hooks.collectives import Array, Steps


class Ops:
    """Operations on one framework's arrays, which also have Python's operators, comparison, indexing, `abs`,
    `reshape`, `swapaxes` and `sum`. `where` broadcasts and takes Python numbers.

    Args:
        xp: the framework's namespace of functions that are named as numpy's; numpy itself by default.
    """

    def __init__(self, xp: Any = np) -> None:
        self._xp = xp
        self.sqrt: Callable[[Array], Array] = xp.sqrt
        self.log: Callable[[Array], Array] = xp.log
        self.cos: Callable[[Array], Array] = xp.cos
        self.round: Callable[[Array], Array] = xp.round  # halves to even
        self.where: Callable[[Array, Array, Array], Array] = xp.where

    def from_numpy(self, array: np.ndarray) -> Array:
        """Returns an array of the framework; unsigned words of 32 bits may be held in wider integers."""
        return self._xp.asarray(array)

    def cast(self, array: Array, dtype: str) -> Array:
        """Returns the array in a dtype."""
        return array.astype(dtype)

    def zeros(self, count: int, dtype: str) -> Array:
        """Returns zeros, shape (count,)."""
        return self._xp.zeros(count, dtype)

    def concat(self, arrays: Sequence[Array], axis: int = 0) -> Array:
        """Joins arrays along an axis."""
        return self._xp.concatenate(list(arrays), axis)

    def split(self, flat: Array, sizes: Sequence[int]) -> list[Array]:
        """Returns the pieces of a flat array."""
        return [flat[end - size : end] for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]

    def stack(self, arrays: Sequence[Array]) -> Array:
        """Returns the arrays along a new first axis."""
        return self._xp.stack(list(arrays))

    def matmul(self, a: Array, b: Array) -> Array:
        """Multiplies matrices in the arrays' own precision."""
        return self._xp.matmul(a, b)

    def amax(self, array: Array) -> Array:
        """Returns the maximum along the last axis, which stays with size 1; NaN if there is one."""
        return self._xp.amax(array, axis=-1, keepdims=True)

    def qr(self, matrices: Array) -> Array:
        """Returns the orthonormal factor of matrices of shape (k, rows, columns), columns <= rows."""
        return self._xp.linalg.qr(matrices)[0]

    def top_k(self, array: Array, k: int) -> Array:
        """Returns the int32 indices of the k largest, in any order; of equal ones, those with the lowest index."""
        return self.cast(self._xp.argsort(-array, kind="stable")[:k], "int32")

    def scatter_add(self, total: Array, indices: Array, values: Array) -> Array:
        """Returns `total`, perhaps overwritten, to which values, shape (ranks, k), are added at indices.

        It is done rank by rank, so that every rank has the same bits. Indices of one rank are different.
        """
        for places, added in zip(indices, values, strict=True):
            total[places] += added
        return total

    def branch(self, condition: Array, yes: Callable[[], Steps], no: Callable[[], Steps]) -> Steps:
        """Runs one of two, by a condition that is the same on all ranks."""
        return (yield from (yes if condition else no)())
