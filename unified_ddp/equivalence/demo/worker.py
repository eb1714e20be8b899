"""A child process of one run: `python -m unified_ddp.equivalence.demo.worker DIRECTORY torch|jax RANK`."""

import faulthandler
import os
import signal
import sys
import threading
from pathlib import Path

from unified_ddp.equivalence.demo.config import Side
from unified_ddp.equivalence.demo.exchange import Exchange


def main(arguments: list[str]) -> None:
    """Runs one torch rank, or the JAX side, to its end."""
    if hasattr(signal, "SIGUSR1"):  # the parent asks a child that hangs where it is
        faulthandler.register(signal.SIGUSR1, all_threads=False)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    directory, side, rank = arguments
    exchange = Exchange(Path(directory))
    config = exchange.job()
    if Side(side) is Side.TORCH:
        from unified_ddp.torch.equivalence.demo_side import run_rank

        run_rank(exchange, config, int(rank))
    else:
        from unified_ddp.jax.equivalence.demo_side import run_side

        run_side(exchange, config)


def _end_with_parent() -> None:
    """The parent holds the other end of stdin: it closes even if the parent is killed, and no child outlives it."""
    while os.read(0, 4096):  # not through sys.stdin, whose lock would be held when the interpreter shuts down
        pass
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
