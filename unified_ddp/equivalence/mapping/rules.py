"""Rules: linear maps from a tensor of one side to (a part of) a tensor of the other.

Weights travel by the map A and gradients by its transpose; only for permutations is the habit of "transposing the
gradient too" right. A rule is written as text, one operation after the other, as in a mapping's file:

    attn.in_proj_weight | take 0 0:64 | permute 1 0 | reshape 64 4 16
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from unified_ddp.equivalence.errors import MappingError
from unified_ddp.equivalence.mapping.operations import (
    Blocks,
    Flip,
    Operation,
    Permute,
    Place,
    Reshape,
    Scale,
    Shape,
    Shift,
    Sum,
    Take,
)


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
