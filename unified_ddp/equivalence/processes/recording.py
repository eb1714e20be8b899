"""A side whose answers are kept in a directory, and one that gives them again, where its program cannot run.

Up to the reduced rung, what a comparison asks of the first side depends on that side, the batches and the settings
alone, so it can be asked beforehand, with the side compared with itself. What it asks of the second side depends on the
first one's weights, so the second side is recorded with the first one's record at hand. Each answer is a file named by
a hash of its question.

    record.json   what was recorded, with which settings
    side.npz      names, shapes, weights, versions
    batches.npz   of the first side
    mapping.toml  of the second side, and pair.json, how it is paired with the first
    answers/      one file a question
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import unified_ddp
from unified_ddp.equivalence.errors import EquivalenceError
from unified_ddp.equivalence.processes.messages import digest, read, write
from unified_ddp.equivalence.results import RUNGS, SideInfo
from unified_ddp.equivalence.side import Arrays, Evaluation, Reduction, Side, TensorInfo, Trajectory

RECORD_FORMAT = "unified_ddp.record.1"
RECORDABLE = RUNGS[: RUNGS.index("reduced") + 1]
"""Rungs whose questions to the first side do not depend on the second's answers."""


def is_record(path: Path) -> bool:
    """Says whether a directory holds a record."""
    return (path / "record.json").is_file()


def write_record(directory: Path, side: Side, batches: Sequence[Any], settings: dict[str, Any]) -> None:
    """Writes what a record holds beside answers; last the file by which it is known to be whole.

    Args:
        directory: of a `Recorder` that has been asked everything.
        side: what was recorded.
        batches: the first side's.
        settings: what `Pair.check` was given, for the same to be asked again.
    """
    static = {
        "framework": side.framework,
        "has_optimizer": side.has_optimizer,
        "tensors": side.tensors(),
        "values": side.values(),
        "info": side.info(),
    }
    _write(directory / "side.npz", static)
    _write(directory / "batches.npz", list(batches))
    head = {"format": RECORD_FORMAT, "unified_ddp": unified_ddp.__version__, "framework": side.framework}
    (directory / "record.json").write_text(json.dumps({**head, "settings": settings}, indent=1))


class Recorder:
    """A side whose answers are written to a directory as well. A question that was answered is not asked again."""

    def __init__(self, side: Side, directory: Path) -> None:
        self._side, self._answers = side, directory / "answers"
        self._answers.mkdir(parents=True)
        self.framework = side.framework
        self.tensors, self.values, self.info = side.tensors, side.values, side.info

    @property
    def has_optimizer(self) -> bool:
        """See `Side`."""
        return self._side.has_optimizer

    def randomness(self, values: Arrays, batch: Any) -> str:
        """See `Side`."""
        return self._kept(("randomness", values, batch), lambda: self._side.randomness(values, batch))

    def evaluate(self, values: Arrays, batch: Any, dtype: str, *, gradients: bool = True) -> Evaluation:
        """See `Side`. Gradients are always computed: with them the answer serves both questions."""
        return self._kept(("evaluate", values, batch, dtype), lambda: self._side.evaluate(values, batch, dtype))

    def reduce(
        self, values: Arrays, shards: Sequence[Any], dtype: str, buckets: Sequence[Sequence[str]] | None = None
    ) -> Reduction:
        """See `Side`."""
        question = _reduce_question(values, shards, dtype, buckets)
        return self._kept(question, lambda: self._side.reduce(values, shards, dtype, buckets))

    def update(self, values: Arrays, gradients: Sequence[Arrays], dtype: str) -> tuple[Arrays, ...]:
        """See `Side`; not kept, see `RECORDABLE`."""
        return self._side.update(values, gradients, dtype)

    def train(self, values: Arrays, batches: Sequence[Any], dtype: str) -> Trajectory:
        """See `Side`; not kept."""
        return self._side.train(values, batches, dtype)

    def _kept(self, question: tuple[Any, ...], ask: Callable[[], Any]) -> Any:
        path = self._answers / f"{digest(question)}.npz"
        if not path.exists():
            _write(path, ask())
        return _read(path)


class RecordedSide:
    """A side that gives the answers of a record; see `Side`.

    Args:
        directory: written by `record`.

    Raises:
        EquivalenceError: it is no record of this version.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            head = json.loads((directory / "record.json").read_text())
        except (OSError, ValueError) as error:
            raise EquivalenceError(f"{directory} is no record: {error}") from error
        if head.get("format") != RECORD_FORMAT or head.get("unified_ddp") != unified_ddp.__version__:
            raise EquivalenceError(
                f"{directory} was recorded as {head.get('format')} by unified_ddp {head.get('unified_ddp')}; this is "
                f"{RECORD_FORMAT} of {unified_ddp.__version__}. Record it again"
            )
        self.settings: dict[str, Any] = head["settings"]
        static = _read(directory / "side.npz")
        self.framework: str = static["framework"]
        self.has_optimizer: bool = static["has_optimizer"]
        self._static = static

    @property
    def batches(self) -> list[Any]:
        """The first side's."""
        return _read(self.directory / "batches.npz")

    def tensors(self) -> tuple[TensorInfo, ...]:
        """See `Side`."""
        return self._static["tensors"]

    def values(self) -> Arrays:
        """See `Side`."""
        return dict(self._static["values"])

    def info(self) -> SideInfo:
        """See `Side`."""
        return self._static["info"]

    def randomness(self, values: Arrays, batch: Any) -> str:
        """See `Side`."""
        return self._answer("randomness", values, batch)

    def evaluate(self, values: Arrays, batch: Any, dtype: str, *, gradients: bool = True) -> Evaluation:
        """See `Side`."""
        return self._answer("evaluate", values, batch, dtype)

    def reduce(
        self, values: Arrays, shards: Sequence[Any], dtype: str, buckets: Sequence[Sequence[str]] | None = None
    ) -> Reduction:
        """See `Side`."""
        return self._answer(*_reduce_question(values, shards, dtype, buckets))

    def update(self, values: Arrays, gradients: Sequence[Arrays], dtype: str) -> tuple[Arrays, ...]:
        """See `Side`."""
        return self._answer("update", values, list(gradients), dtype)

    def train(self, values: Arrays, batches: Sequence[Any], dtype: str) -> Trajectory:
        """See `Side`."""
        return self._answer("train", values, list(batches), dtype)

    def _answer(self, *question: Any) -> Any:
        path = self.directory / "answers" / f"{digest(question)}.npz"
        if not path.exists():
            settings = ", ".join(f"{name} {value}" for name, value in self.settings.items())
            raise EquivalenceError(
                f"{self.directory} ({self.framework}; {settings}) has no answer to what this comparison asks "
                f"({question[0]}). It was recorded with other settings, weights or batches, or names leave the mapping "
                "open, which takes a running side to find out: give --mapping"
            )
        return _read(path)


def _reduce_question(values: Arrays, shards: Sequence[Any], dtype: str, buckets: Any) -> tuple[Any, ...]:
    return ("reduce", values, list(shards), dtype, buckets and [list(bucket) for bucket in buckets])


def _write(path: Path, value: Any) -> None:
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        write(value, file)
    partial.replace(path)


def _read(path: Path) -> Any:
    with path.open("rb") as file:
        return read(file)
