"""What the commands share: exit statuses, and how a run ends that could not be carried out."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.markup import escape

from unified_ddp.errors import UnifiedDDPError

EXIT_FAILED = 1
"""What was compared differs."""
EXIT_COULD_NOT_RUN = 2
"""Nothing can be said. Also the status of a wrong option."""


@contextmanager
def could_not_run() -> Iterator[None]:
    """Turns a named error into its text and an exit status, and SIGTERM into an exit by which children are ended."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    except UnifiedDDPError as error:
        Console(stderr=True).print(f"[red]could not run:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(EXIT_COULD_NOT_RUN) from None
