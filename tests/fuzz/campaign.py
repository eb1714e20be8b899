"""Draws many programs from one seed."""

import random

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed

from fuzz.programs import Program, programs

SPREAD = 4


def draw(seed: int, together: int, apart: int) -> list[Program]:
    """Returns programs: the same for the same numbers and the same version of hypothesis.

    More are drawn and some of them taken, as hypothesis follows each by a few that hardly differ.
    """
    return [*_draw(seed, together, False), *_draw(seed, apart, True)]


def _draw(seed: int, count: int, ranks_apart: bool) -> list[Program]:
    drawn: list[Program] = []
    if not count:
        return drawn

    @hypothesis_seed(seed)
    @settings(
        max_examples=SPREAD * count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs(ranks_apart))
    def take(program: Program) -> None:
        drawn.append(program)

    take()
    return random.Random(seed).sample(drawn, count)
