"""What is left of a wrapper and its group after a few hundred steps; `make soak` runs thousands."""

from collections.abc import Callable
from typing import Any

from soak.run import soak


def test_nothing_is_left(world: Callable[[int], Any]) -> None:
    for result in world(2).run(soak, timeout=200, steps=300, warm_up=20):
        assert result["after"] == result["before"]
