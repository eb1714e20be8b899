"""Rules: linear maps from a tensor of one side to (a part of) a tensor of the other.

Weights travel by the map A, gradients by its transpose: a scale is the same factor on both ways, not its inverse; what
is summed in weights is copied in gradients. For permutations alone the transpose is the inverse, and only there the
habit of "transposing the gradient too" is right.

A rule is written as text, one operation after the other, as in a mapping's file:

    attn.in_proj_weight | take 0 0:64 | permute 1 0 | reshape 64 4 16
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
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


@dataclass(frozen=True)
class Rule:
    """Operations one after the other; none is the identity."""

    operations: tuple[Operation, ...] = ()

    def then(self, *operations: Operation) -> "Rule":
        """Returns the rule with more operations behind it."""
        return Rule((*self.operations, *operations))

    def shape(self, shape: Shape) -> Shape:
        """Returns the shape of the result; raises MappingError where an operation does not fit."""
        return reduce(lambda shape, operation: operation.shape(shape), self.operations, tuple(shape))

    def fits(self, shape: Shape, target: Shape) -> bool:
        """Says whether the rule makes a tensor of shape `target` from one of shape `shape`."""
        try:
            return self.shape(shape) == tuple(target)
        except MappingError:
            return False

    def apply(self, array: np.ndarray) -> np.ndarray:
        """Returns A w (plus constants, see `Shift`)."""
        self.shape(array.shape)
        return reduce(lambda array, operation: operation.apply(array), self.operations, array)

    def transpose(self, array: np.ndarray, shape: Shape) -> np.ndarray:
        """Returns A' g, of the shape `shape` of the source."""
        for operation, before in zip(reversed(self.operations), reversed(self._shapes(shape)), strict=True):
            array = operation.transpose(array, before)
        return array

    def invert(self, array: np.ndarray, shape: Shape) -> np.ndarray:
        """Returns a w, of the shape `shape` of the source, with A w = `array`; zeros where the rule does not look."""
        for operation, before in zip(reversed(self.operations), reversed(self._shapes(shape)), strict=True):
            array = operation.invert(array, before)
        return array

    def _shapes(self, shape: Shape) -> list[Shape]:
        shapes = [tuple(shape)]
        for operation in self.operations:
            shapes.append(operation.shape(shapes[-1]))
        return shapes[:-1]

    def text(self, source: str) -> str:
        """Returns the rule with the name of its source in front, as `parse_rule` reads it."""
        return " | ".join([source, *(operation.text() for operation in self.operations)])


def parse_rule(text: str) -> tuple[str, Rule]:
    """Returns the source's name and the rule that `Rule.text` wrote.

    Raises:
        MappingError: an operation is unknown, or its arguments do not fit it.
    """
    source, *parts = [part.strip() for part in text.split("|")]
    if not source:
        raise MappingError(f"rule {text!r} names no tensor; it starts with one, as in 'conv1.weight | permute 2 3 1 0'")
    return source, Rule(tuple(_operation(part, text) for part in parts))


def _operation(part: str, text: str) -> Operation:
    word, *arguments = part.split() or [""]
    make = _PARSERS.get(word)
    if make is None:
        raise MappingError(f"rule {text!r} has the operation {word!r}; known ones: {', '.join(_PARSERS)}")
    try:
        return make(arguments)
    except (ValueError, IndexError) as error:
        raise MappingError(f"rule {text!r}: the arguments of {part!r} do not fit; as in {_EXAMPLES[word]!r}") from error


def _take(arguments: list[str]) -> Take:
    axis, picked = arguments
    start, colon, stop = picked.partition(":")
    return Take(int(axis), int(start), int(stop) if colon else None)


def _place(new: bool) -> Callable[[list[str]], Place]:
    def parse(arguments: list[str]) -> Place:
        axis, start, of, size = arguments
        if of != "of":
            raise ValueError(of)
        return Place(int(axis), int(start), int(size), new)

    return parse


def _one_float(make: Callable[[float], Operation]) -> Callable[[list[str]], Operation]:
    def parse(arguments: list[str]) -> Operation:
        (number,) = arguments
        return make(float(number))

    return parse


def _ints(arguments: Sequence[str]) -> tuple[int, ...]:
    return tuple(int(argument) for argument in arguments)


_PARSERS: dict[str, Callable[[list[str]], Operation]] = {
    "permute": lambda arguments: Permute(_ints(arguments)),
    "reshape": lambda arguments: Reshape(_ints(arguments)),
    "flip": lambda arguments: Flip(_ints(arguments)),
    "blocks": lambda arguments: Blocks(int(arguments[0]), _ints(arguments[1:])),
    "take": _take,
    "place": _place(False),
    "stack": _place(True),
    "scale": _one_float(Scale),
    "shift": _one_float(Shift),
    "sum": lambda arguments: Sum(*_ints(arguments)) if len(arguments) == 1 else _refuse(arguments),
}

_EXAMPLES = {
    "permute": "permute 2 3 1 0",
    "reshape": "reshape 64 4 16",
    "flip": "flip 0 1",
    "blocks": "blocks 0 0 1 3 2",
    "take": "take 0 0:64",
    "place": "place 0 64 of 192",
    "stack": "stack 0 3 of 12",
    "scale": "scale 0.125",
    "shift": "shift -1.0",
    "sum": "sum 0",
}


def _refuse(arguments: list[str]) -> Operation:
    raise ValueError(arguments)


def _require_axis(operation: Operation, axis: int, shape: Shape) -> None:
    if not 0 <= axis < len(shape):
        raise MappingError(f"'{operation.text()}' does not fit an array of shape {shape}: it has no axis {axis}")


def _numbers(values: Sequence[int]) -> str:
    return " ".join(map(str, values))
