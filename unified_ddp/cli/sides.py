"""How a command comes to its sides: each runs in a process of its own, or was recorded."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from unified_ddp.equivalence.errors import EquivalenceError
from unified_ddp.equivalence.processes.loading import Program
from unified_ddp.equivalence.processes.messages import digest
from unified_ddp.equivalence.processes.recording import RecordedSide, is_record
from unified_ddp.equivalence.processes.remote import RemoteSide, find_python
from unified_ddp.equivalence.report.progress import Tell

AnySide = RemoteSide | RecordedSide
Source = Program | RecordedSide


def sources(*texts: str) -> list[Source]:
    """Returns what each text names: FILE.py:FUNCTION, or a directory of `record`.

    Raises:
        EquivalenceError: it names neither.
    """
    return [_source(text) for text in texts]


def _source(text: str) -> Source:
    path = Path(text)
    if not path.is_dir():
        return Program.parse(text)
    if not is_record(path):
        raise EquivalenceError(
            f"{text} is a directory, but no record: it has no record.json. `unified-ddp record` writes one"
        )
    return RecordedSide(path)


def recorded_settings(found: Sequence[Source]) -> dict[str, Any] | None:
    """Returns the settings of the last record among the sides, None if there is none."""
    return next((s.settings for s in reversed(found) if isinstance(s, RecordedSide)), None)


def pythons(found: Sequence[Source], torch_python: str | None, jax_python: str | None) -> list[str]:
    """Returns the interpreter of each side; "" for a recorded one.

    Raises:
        EquivalenceError: an interpreter is not there or lacks unified_ddp, or it cannot be told which one a side needs.
    """
    given = {"torch": torch_python, "jax": jax_python}
    found_by = {name: find_python(f"--{name}-python", python) for name, python in given.items()}
    chosen = []
    for source in found:
        if isinstance(source, RecordedSide):
            chosen.append("")
            continue
        framework = source.framework()
        if not framework and any(given.values()):
            raise EquivalenceError(
                f"{source}: --torch-python and --jax-python go by the class that the file names, and it names neither "
                "or both of TorchSide and JaxSide; make the side in a file of its own"
            )
        chosen.append(found_by[framework or "torch"])
    return chosen


@contextmanager
def opened(
    found: Sequence[Source], interpreters: Sequence[str], ranks: int, timeout: float, tell: Tell
) -> Iterator[list[AnySide]]:
    """Starts the processes of all sides at once and yields the sides when all are made; ends the processes afterwards.

    Raises:
        EquivalenceError: a side cannot be made.
    """
    with ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="unified-ddp-")))
        sides: list[AnySide] = []
        for source, python in zip(found, interpreters, strict=True):
            if isinstance(source, Program):
                sides.append(stack.enter_context(RemoteSide(source, python, directory, ranks, timeout)))
            else:
                sides.append(source)
        for done, side in enumerate(sides):
            if isinstance(side, RemoteSide):
                tell(f"starting {side.program}", done, len(sides))
                side.start()
        yield sides


def batches_of(sides: Sequence[AnySide]) -> list[Any]:
    """Returns the first side's batches.

    Raises:
        EquivalenceError: it has none, or the second has others.
    """
    first, *rest = sides
    batches = first.batches
    if not batches:
        name = first.program if isinstance(first, RemoteSide) else first.directory
        raise EquivalenceError(
            f"{name} gives no batches: the first side's function returns (side, batches), a list of them"
        )
    for other in rest:
        if isinstance(other, RemoteSide) and other.batches and digest(other.batches) != digest(batches):
            raise EquivalenceError(
                f"{other.program} gives batches of its own, which differ from the first side's. Both get the first "
                "side's, the axes moved by --layout: let the second side's function return the side alone"
            )
    return batches
