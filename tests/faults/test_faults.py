"""Every row of the table, with our class."""

from collections.abc import Callable
from typing import Any

import pytest

from faults.judge import judge
from faults.table import load


@pytest.mark.parametrize("name", load())
def test_row(world: Callable[[int], Any], name: str) -> None:
    row = load()[name]
    outcome = judge(row, world(row.ranks))
    assert outcome.right, f"{name}, {row.plain}: {outcome.text}"
