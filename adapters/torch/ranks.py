"""Saying which ranks hold what, in errors."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["sides_by_rank", "tell"]


def sides_by_rank(values: Sequence[Any], show: Callable[[Any], str]) -> dict[str, list[int]]:
    """Returns the ranks that hold each value, by what is shown of it, in order of the first rank."""
    sides = defaultdict(list)
    for rank, value in enumerate(values):
        sides[show(value)].append(rank)
    return dict(sides)


def tell(sides: dict[str, list[int]]) -> str:
    """Returns them in words: "a on ranks 0, 2, b on rank 1"."""
    return ", ".join(f"{value} on rank{'s' * (len(r) > 1)} {', '.join(map(str, r))}" for value, r in sides.items())
