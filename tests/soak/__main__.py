"""`python -m soak [--steps N]`: memory, step time, file descriptors and threads over many steps on two ranks."""

import itertools
from typing import Annotated

import typer
from support.world import World

from soak.run import MIB, soak


def main(
    steps: Annotated[int, typer.Option(help="of training, two forwards and backward passes each")] = 10_000,
    warm_up: Annotated[int, typer.Option(help="steps before memory is looked at")] = 1_000,
) -> None:
    """Prints what was seen; exits with 1 if memory grows by more than 1 MiB or something is left behind."""
    world = World(2)
    try:
        results = world.run(soak, timeout=1800, steps=steps, warm_up=warm_up)
    finally:
        world.stop()
    bad = False
    for rank, result in enumerate(results):
        memory, seconds = result["memory"], result["seconds"]
        grown = (memory[-1] - memory[0]) / MIB
        bad |= grown > 1 or result["before"] != result["after"]
        print(f"rank {rank}, {steps} steps: memory after warm-up {memory[0] / MIB:.1f} MiB, grown by {grown:+.2f} MiB")
        print(f"  growth by window, KiB: {[(b - a) // 1024 for a, b in itertools.pairwise(memory)]}")
        early, late = seconds[0] * 1e3, seconds[-1] * 1e3
        print(
            f"  median step, first window {early:.3f} ms, last {late:.3f} ms; all {[f'{s * 1e3:.2f}' for s in seconds]}"
        )
        print(f"  held before {result['before']}, after {result['after']}")
    raise typer.Exit(bad)


typer.run(main)
