"""The collectives that a hook may ask for, and who answers."""

import dataclasses
from collections.abc import Callable, Generator
from typing import Any

Array = Any


@dataclasses.dataclass(frozen=True)
class Sum:
    """Asks for the sum of an array over all ranks, added in the array's dtype. The array may be overwritten."""

    array: Array


@dataclasses.dataclass(frozen=True)
class Gather:
    """Asks for every rank's array, stacked by rank along a new first axis."""

    array: Array


Steps = Generator[Sum | Gather, Array, Any]


def drive(steps: Steps, perform: Callable[[Sum | Gather], Array]) -> Any:
    """Returns what a hook returns, answering each collective as it is asked for."""
    answer = None
    while True:
        try:
            request = steps.send(answer)
        except StopIteration as stop:
            return stop.value
        answer = perform(request)
