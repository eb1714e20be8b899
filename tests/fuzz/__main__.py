"""`python -m fuzz [--programs N] [--seed S] [--program DATA]`: draws programs, or replays one."""

import ast
import random
import time
from typing import Annotated

import typer
from rich.console import Console
from support.world import World

from fuzz.campaign import draw
from fuzz.judge import is_apart, judge

console = Console(width=160, markup=False, highlight=False, soft_wrap=True)


def main(
    programs: Annotated[int, typer.Option(help="how many to draw")] = 500,
    apart: Annotated[int, typer.Option(help="of these, how many in which ranks do different things")] = 100,
    seed: Annotated[int | None, typer.Option(help="of what is drawn; any if not given, and printed")] = None,
    program: Annotated[str, typer.Option(help="runs this one, given as data, instead")] = "",
) -> None:
    """Runs programs on real ranks and prints those that end neither as the oracle says nor in a named error."""
    worlds: dict[int, World] = {}
    seed = random.randrange(10**6) if seed is None else seed
    drawn = [ast.literal_eval(program)] if program else draw(seed, programs - apart, apart)
    console.print(f"{len(drawn)} programs, seed {seed}")
    started, failed, slow = time.monotonic(), 0, 0.0
    try:
        for number, data in enumerate(drawn):
            begun = time.monotonic()
            said = judge(data, worlds.setdefault(data["ranks"], World(data["ranks"])))
            slow = max(slow, time.monotonic() - begun)
            if said:
                failed += 1
                kind = "apart" if is_apart(data) else "together"
                console.print(f"--- program {number} of seed {seed} (ranks {kind}): {said}\n{data}")
    finally:
        for world in worlds.values():
            world.stop()
    console.print(
        f"{failed} of {len(drawn)} programs failed, in {time.monotonic() - started:.0f} s, the slowest in {slow:.0f} s"
    )
    raise typer.Exit(1 if failed else 0)


typer.run(main)
