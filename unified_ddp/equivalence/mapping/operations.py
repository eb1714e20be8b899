"""Operations of which rules consist: linear maps on one array, with their transposes.

A scale is the same factor for weights and for gradients, not its inverse; what is summed in weights is copied in
gradients. For permutations alone the transpose is the inverse.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from unified_ddp.equivalence.errors import MappingError

Shape = tuple[int, ...]


class Operation(Protocol):
    """One linear map (`Shift` alone adds a constant as well, which gradients do not see)."""

    def shape(self, shape: Shape) -> Shape:
        """Returns the shape of the result; raises MappingError if the operation does not fit the shape."""

    def apply(self, array: np.ndarray) -> np.ndarray:
        """Returns A x."""

    def transpose(self, array: np.ndarray, shape: Shape) -> np.ndarray:
        """Returns A' y for y of the result's shape; `shape` is that of x."""

    def invert(self, array: np.ndarray, shape: Shape) -> np.ndarray:
        """Returns the x of least norm with A x nearest to y."""

    def text(self) -> str:
        """Returns the operation as in a mapping's file."""


@dataclass(frozen=True)
class Permute:
    """Axes in a new order: `permute 2 3 1 0` makes HWIO of OIHW."""

    axes: tuple[int, ...]

    def shape(self, shape: Shape) -> Shape:
        """See `Operation`."""
        if sorted(self.axes) != list(range(len(shape))):
            raise MappingError(f"'{self.text()}' does not fit an array of shape {shape}: give each of its axes once")
        return tuple(shape[axis] for axis in self.axes)

    def apply(self, array: np.ndarray) -> np.ndarray:
        """See `Operation`."""
        return array.transpose(self.axes)

    def transpose(self, array: np.ndarray, shape: Shape) -> np.ndarray:
        """See `Operation`."""
        return array.transpose(tuple(int(axis) for axis in np.argsort(self.axes)))

    invert = transpose

    def text(self) -> str:
        """See `Operation`."""
        return f"permute {_numbers(self.axes)}"


@dataclass(frozen=True)
class Reshape:
    """The same elements in another shape, row-major."""

    target: Shape

    def shape(self, shape: Shape) -> Shape:
        """See `Operation`."""
        if math.prod(shape) != math.prod(self.target):
            raise MappingError(f"'{self.text()}' does not fit an array of shape {shape}: numbers of elements differ")
        return self.target

    def apply(self, array: np.ndarray) -> np.ndarray:
        """See `Operation`."""
        return array.reshape(self.target)

    def transpose(self, array: np.ndarray, shape: Shape) -> np.ndarray:
        """See `Operation`."""
        return array.reshape(shape)

    invert = transpose

    def text(self) -> str:
        """See `Operation`."""
        return f"reshape {_numbers(self.target)}".rstrip()


@dataclass(frozen=True)
class Flip:
    """Axes reversed, as in the kernels of transposed convolutions."""

    axes: tuple[int, ...]

    def shape(self, shape: Shape) -> Shape:
        """See `Operation`."""
        for axis in self.axes:
            _require_axis(self, axis, shape)
        return shape

    def apply(self, array: np.ndarray) -> np.ndarray:
        """See `Operation`."""
        return np.flip(array, self.axes)

    def transpose(self, array: np.ndarray, shape: Shape) -> np.ndarray:
        """See `Operation`."""
        return np.flip(array, self.axes)

    invert = transpose

    def text(self) -> str:
        """See `Operation`."""
        return f"flip {_numbers(self.axes)}"


@dataclass(frozen=True)
class Blocks:
    """An axis cut into equal blocks, which are put in a new order, as with the gates of an LSTM."""

    axis: int
    order: tuple[int, ...]

    def shape(self, shape: Shape) -> Shape:
        """See `Operation`."""
        _require_axis(self, self.axis, shape)
        if sorted(self.order) != list(range(len(self.order))) or shape[self.axis] % len(self.order):
            raise MappingError(f"'{self.text()}' does not fit shape {shape}: give each block once, of equal sizes")
        return shape

    def apply(self, array: np.ndarray) -> np.ndarray:
        """See `Operation`."""
        return self._reorder(array, self.order)

    def transpose(self, array: np.ndarray, shape: Shape) -> np.ndarray:
        """See `Operation`."""
        return self._reorder(array, [int(i) for i in np.argsort(self.order)])

    invert = transpose

    def _reorder(self, array: np.ndarray, order: Sequence[int]) -> np.ndarray:
        parts = np.split(array, len(order), self.axis)
        return np.concatenate([parts[i] for i in order], self.axis)

    def text(self) -> str:
        """See `Operation`."""
        return f"blocks {self.axis} {_numbers(self.order)}"


@dataclass(frozen=True)
class Take:
    """A slice of one axis, as the query of a packed query, key and value. `take 0 3` drops the axis."""

    axis: int
    start: int
    stop: int | None
    """None takes one index and drops the axis."""

    def shape(self, shape: Shape) -> Shape:
        """See `Operation`."""
        _require_axis(self, self.axis, shape)
        stop = self.start + 1 if self.stop is None else self.stop
        if not 0 <= self.start < stop <= shape[self.axis]:
            raise MappingError(f"'{self.text()}' does not fit shape {shape}: axis {self.axis} has {shape[self.axis]}")
        middle = () if self.stop is None else (stop - self.start,)
        return (*shape[: self.axis], *middle, *shape[self.axis + 1 :])

    def _index(self) -> tuple[slice | int, ...]:
        picked = self.start if self.stop is None else slice(self.start, self.stop)
        return (*[slice(None)] * self.axis, picked)

    def apply(self, array: np.ndarray) -> np.ndarray:
        """See `Operation`."""
        return array[self._index()]

    def transpose(self, array: np.ndarray, shape: Shape) -> np.ndarray:
        """See `Operation`."""
        whole = np.zeros(shape, array.dtype)
        whole[self._index()] = array
        return whole

    invert = transpose

    def text(self) -> str:
        """See `Operation`."""
        return f"take {self.axis} {self.start}" + ("" if self.stop is None else f":{self.stop}")


@dataclass(frozen=True)
class Place:
    """The transpose of `Take`: a part of a larger tensor, zeros elsewhere. `place 0 2 of 4` adds an axis (a stack)."""

    axis: int
    start: int
    size: int
    new: bool

    def shape(self, shape: Shape) -> Shape:
        """See `Operation`."""
        if self.new:
            if not 0 <= self.axis <= len(shape) or not 0 <= self.start < self.size:
                raise MappingError(f"'{self.text()}' does not fit shape {shape}")
            return (*shape[: self.axis], self.size, *shape[self.axis :])
        _require_axis(self, self.axis, shape)
        if not 0 <= self.start <= self.size - shape[self.axis]:
            raise MappingError(f"'{self.text()}' does not fit shape {shape}: it ends behind {self.size}")
        return (*shape[: self.axis], self.size, *shape[self.axis + 1 :])

    def _take(self, shape: Shape) -> Take:
        return Take(self.axis, self.start, None if self.new else self.start + shape[self.axis])

    def apply(self, array: np.ndarray) -> np.ndarray:
        """See `Operation`."""
        return self._take(array.shape).transpose(array, self.shape(array.shape))

    def transpose(self, array: np.ndarray, shape: Shape) -> np.ndarray:
        """See `Operation`."""
        return self._take(shape).apply(array)

    invert = transpose

    def text(self) -> str:
        """See `Operation`."""
        return f"{'stack' if self.new else 'place'} {self.axis} {self.start} of {self.size}"


@dataclass(frozen=True)
class Scale:
    """Every element times a number other than zero."""

    factor: float

    def shape(self, shape: Shape) -> Shape:
        """See `Operation`."""
        if self.factor == 0 or not math.isfinite(self.factor):
            raise MappingError(f"'{self.text()}': a scale is a finite number other than zero")
        return shape

    def apply(self, array: np.ndarray) -> np.ndarray:
        """See `Operation`."""
        return (array * self.factor).astype(array.dtype)

    def transpose(self, array: np.ndarray, shape: Shape) -> np.ndarray:
        """See `Operation`."""
        return self.apply(array)

    def invert(self, array: np.ndarray, shape: Shape) -> np.ndarray:
        """See `Operation`."""
        return (array / self.factor).astype(array.dtype)

    def text(self) -> str:
        """See `Operation`."""
        return f"scale {self.factor!r}"


@dataclass(frozen=True)
class Shift:
    """A constant added to weights, as where one side's norm multiplies by 1 + w; gradients and differences pass."""

    constant: float

    def shape(self, shape: Shape) -> Shape:
        """See `Operation`."""
        return shape

    def apply(self, array: np.ndarray) -> np.ndarray:
        """See `Operation`."""
        return (array + self.constant).astype(array.dtype)

    def transpose(self, array: np.ndarray, shape: Shape) -> np.ndarray:
        """See `Operation`."""
        return array

    def invert(self, array: np.ndarray, shape: Shape) -> np.ndarray:
        """See `Operation`."""
        return (array - self.constant).astype(array.dtype)

    def text(self) -> str:
        """See `Operation`."""
        return f"shift {self.constant!r}"


@dataclass(frozen=True)
class Sum:
    """The sum over one axis, which is dropped."""

    axis: int

    def shape(self, shape: Shape) -> Shape:
        """See `Operation`."""
        _require_axis(self, self.axis, shape)
        return (*shape[: self.axis], *shape[self.axis + 1 :])

    def apply(self, array: np.ndarray) -> np.ndarray:
        """See `Operation`."""
        return array.sum(self.axis, dtype=array.dtype)

    def transpose(self, array: np.ndarray, shape: Shape) -> np.ndarray:
        """See `Operation`."""
        return np.broadcast_to(np.expand_dims(array, self.axis), shape).copy()

    def invert(self, array: np.ndarray, shape: Shape) -> np.ndarray:
        """See `Operation`."""
        return (self.transpose(array, shape) / shape[self.axis]).astype(array.dtype)

    def text(self) -> str:
        """See `Operation`."""
        return f"sum {self.axis}"


def _require_axis(operation: Operation, axis: int, shape: Shape) -> None:
    if not 0 <= axis < len(shape):
        raise MappingError(f"'{operation.text()}' does not fit an array of shape {shape}: it has no axis {axis}")


def _numbers(values: Sequence[int]) -> str:
    return " ".join(map(str, values))
