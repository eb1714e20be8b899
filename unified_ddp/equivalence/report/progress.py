"""What is said while a comparison runs: a bar on a terminal, a line a phase elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

Tell = Callable[[str, int, int], None]
"""Is told the phase, how much of it is done and of how much."""


@contextmanager
def showing_progress(console: Console) -> Iterator[Tell]:
    """Yields what is to be told of progress. The bar goes when the context ends; lines stay."""
    if not console.is_terminal:
        yield _Lines(console)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda phase, done, total: bar.update(task, description=phase, completed=done, total=total)


class _Lines:
    """One line when a phase begins."""

    def __init__(self, console: Console) -> None:
        self._console, self._phase, self._began = console, "", time.monotonic()

    def __call__(self, phase: str, done: int, total: int) -> None:
        if phase != self._phase:
            self._phase = phase
            seconds = time.monotonic() - self._began
            self._console.print(f"{seconds:6.1f} s  {phase}", highlight=False, markup=False, soft_wrap=True)
