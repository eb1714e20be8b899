"""A child process of one run: `python -m unified_ddp.equivalence.demo.worker DIRECTORY torch|jax RANK`."""

import sys
from pathlib import Path

from unified_ddp.equivalence.demo.config import Side
from unified_ddp.equivalence.demo.exchange import Exchange
from unified_ddp.equivalence.processes.child import follow_parent


def main(arguments: list[str]) -> None:
    """Runs one torch rank, or the JAX side, to its end."""
    follow_parent()
    directory, side, rank = arguments
    exchange = Exchange(Path(directory))
    config = exchange.job()
    if Side(side) is Side.TORCH:
        from unified_ddp.torch.equivalence.demo_side import run_rank

        run_rank(exchange, config, int(rank))
    else:
        from unified_ddp.jax.equivalence.demo_side import run_side

        run_side(exchange, config)


if __name__ == "__main__":
    main(sys.argv[1:])
