"""Programs drawn at random, the same in each run; FUZZ_SEED draws others, and `make fuzz` many."""

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest

from fuzz.campaign import draw
from fuzz.judge import judge
from fuzz.programs import Program

SEED = int(os.environ.get("FUZZ_SEED", "0"))
TOGETHER, APART = 27, 3


@functools.cache
def drawn() -> list[Program]:
    return draw(SEED, TOGETHER, APART)


@pytest.mark.parametrize("number", range(TOGETHER + APART))
def test_program(world: Callable[[int], Any], number: int) -> None:
    program = drawn()[number]
    said = judge(program, world(program["ranks"]))
    assert said is None, (
        f"program {number} of seed {SEED}: {said}\nPYTHONPATH=tests python -m fuzz --program '{program}'"
    )
