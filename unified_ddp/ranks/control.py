"""The control plane: before ranks meet in collectives that carry data, they tell each other what comes next.

A collective cannot tell what it carries: a rank that broadcasts buffers while another sums gradients gets numbers that
mean nothing, or is ended by a mismatch of sizes. So each rank announces its next step to all, as a few integers on
connections of their own, and no collective of that step is started before all have announced the same. Steps without
collectives are not announced: ranks may differ in forwards under no_sync, and in those that no backward pass follows.
"""

import enum
import functools
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Protocol

from unified_ddp.errors import OutOfStepError, ReductionError
from unified_ddp.ranks.progress import Progress
from unified_ddp.ranks.texts import tell_sides


class Answers(Protocol):
    """What all ranks announced, under way."""

    def result(self, look: Callable[[], None]) -> list[list[int]]:
        """Waits and returns every rank's integers, by rank.

        Args:
            look: called now and then; what it raises ends the wait.
        """


class Plane(Protocol):
    """Connections between the ranks that carry nothing but announcements."""

    def start(self, values: Sequence[int]) -> Answers:
        """Starts telling all ranks these integers of 63 bits; all ranks give as many, in the same order of calls."""


class Event(enum.IntEnum):
    """What comes next."""

    FORWARD = 1
    BACKWARD = 2
    ACCUMULATED = 3
    CHECK = 4
    AFTER_EXCEPTION = 5


class Does(enum.IntFlag):
    """What a forward, or a call of sync_gradients, communicates before or after the module is run."""

    NOTHING = 0
    IS_LOCAL = 1
    FOLLOWS_MODULE = 2
    COMPARES_HOOKS = 4
    REBUILDS_BUCKETS = 8
    CHECKS_REPLICAS = 16
    SYNCS_BUFFERS = 32
    SYNCS_BUFFERS_AFTER = 64
    FOLLOWS_MODULE_AFTER = 128
    AGREES = 256
    RECORDS_NOTHING = 512


_DOES = {
    Does.FOLLOWS_MODULE: "compares the module, which was changed",
    Does.COMPARES_HOOKS: "compares the comm hooks, at the first synchronising forward",
    Does.REBUILDS_BUCKETS: "rebuilds the buckets",
    Does.CHECKS_REPLICAS: "checks the replicas",
    Does.SYNCS_BUFFERS: "broadcasts buffers",
    Does.SYNCS_BUFFERS_AFTER: "broadcasts buffers at its end",
    Does.FOLLOWS_MODULE_AFTER: "compares the module, which was changed inside it",
    Does.AGREES: "gave up a backward pass after an exception",
}


@dataclass(frozen=True)
class Step:
    """What a rank is about to do. Ranks may do it together if these are equal.

    Attributes:
        event: what.
        passes: how many reductions came before, or, of a backward pass, its number.
        forward: of a backward pass, which forward its gradients come from, counting those that a pass followed; 0 if
            it passed no output.
        repeat: of a backward pass, the how many-eth through this forward; after an exception, buckets launched.
        does: what it communicates beside gradients.
        plan: 63 bits of the bucket plan.
    """

    event: Event
    passes: int
    forward: int = 0
    repeat: int = 0
    does: Does = Does.NOTHING
    plan: int = 0

    def text(self) -> str:
        """Returns what the rank does, to be followed by "on rank 1"."""
        done = [text for flag, text in _DOES.items() if flag in self.does]
        also = f" ({', '.join(done)})" if done else ""
        match self.event:
            case Event.FORWARD:
                kind = "under no_sync" if Does.IS_LOCAL in self.does else "synchronising"
                kind = "without gradients" if Does.RECORDS_NOTHING in self.does else kind
                return f"a forward{also}, after {self.passes} reductions, that is {kind}"
            case Event.BACKWARD:
                origin = "that passes no output of the wrapper"
                if self.forward:
                    origin = f"which is pass {self.repeat} through the outputs of synchronising forward {self.forward}"
                return f"synchronising backward pass {self.passes}, {origin} (of those that a pass followed)"
            case Event.ACCUMULATED:
                return f"sync_gradients(){also}, after {self.passes} reductions,"
            case Event.CHECK:
                return f"check_replicas(), after {self.passes} reductions,"
            case Event.AFTER_EXCEPTION:
                return f"what follows an exception in pass {self.passes} after {self.repeat} buckets"


class Control:
    """One wrapper's announcements.

    Args:
        plane: returns the connections, or None if there can be none; called once, at the first announcement.
        progress: names waits in errors.
    """

    def __init__(self, plane: Callable[[], Plane | None], progress: Progress) -> None:
        self._make_plane = plane
        self._plane: Plane | None = None
        self._is_connected = False
        self._progress = progress
        self.is_paused = False
        """Whether nothing is announced: inside `join`, whose ranks keep step by themselves."""
        self._pending: Answers | None = None

    def announce(self, step: Step) -> None:
        """Starts to tell all ranks of this one's next step."""
        plane = None if self.is_paused else self._connected()
        if plane is not None:
            progress = self._progress
            numbers = (progress.wrapper, progress.forwards, progress.local_forwards, *astuple(step))
            self._pending = plane.start([int(number) for number in numbers])

    def settle(self, phase: str, detail: str) -> None:
        """Waits until all ranks have announced the same; at once if nothing was announced since the last call.

        Args:
            phase: what fails if a rank does not come, in words that are the same on every rank.
            detail: what comes next here.

        Raises:
            OutOfStepError: on every rank, if they announced different steps.
            ReductionError: a rank did not come; names it.
        """
        if self._pending is None:
            return
        answers, self._pending = self._pending, None
        with self._progress.waiting(phase, detail):
            rows = answers.result(functools.partial(self._progress.require_elsewhere, phase))
        if any(row[:1] + row[3:] != rows[0][:1] + rows[0][3:] for row in rows):
            raise _difference(rows, self._progress.global_ranks)

    def agree(self, passes: int, launched: int) -> None:
        """Makes sure that all ranks gave up the same pass at the same point.

        Args:
            passes: number of the pass that this rank gave up.
            launched: after how many buckets.

        Raises:
            ReductionError: they did not; on every rank.
        """
        phase = "the agreement of ranks after an exception in a backward pass"
        detail = f"given up: {self._progress.pass_name}"
        if self._connected() is not None:
            self.announce(Step(Event.AFTER_EXCEPTION, passes, repeat=launched))
            self.settle(phase, detail)
            return
        with self._progress.waiting(phase, detail):
            every = self._progress.gather(passes << 32 | launched)
        if len(set(every)) > 1:
            points = [(value >> 32, value & 0xFFFFFFFF) for value in every]
            raise _different_points(points, self._progress.global_ranks)

    def _connected(self) -> Plane | None:
        if not self._is_connected:
            with self._progress.waiting("the start of the control plane", "connecting to the other ranks"):
                self._plane = self._make_plane()
            self._is_connected = True
        return self._plane

    def connect_anew(self) -> None:
        """Hears that the ranks are others now."""
        self._is_connected = False
        self._pending = None


def _different_points(points: Sequence[tuple[int, int]], ranks: Sequence[int]) -> ReductionError:
    lines = [f"pass {number} after {buckets} buckets" for number, buckets in points]
    told = "; ".join(f"rank {rank}: {line}" for rank, line in zip(ranks, lines, strict=True))
    return ReductionError(
        "an exception ended synchronising backward passes at different points of the ranks, so that their gradients no "
        f"longer match: {told}. Start again from a checkpoint"
    )


def _difference(rows: list[list[int]], ranks: Sequence[int]) -> ReductionError:
    steps = [Step(Event(row[3]), row[4], row[5], row[6], Does(row[7]), row[8]) for row in rows]
    if all(step.event is Event.AFTER_EXCEPTION for step in steps):
        return _different_points([(step.passes, step.repeat) for step in steps], ranks)
    wrappers = [f" of wrapper {row[0]} on these ranks" if row[0] != rows[0][0] else "" for row in rows]
    texts = [step.text() + wrapper for step, wrapper in zip(steps, wrappers, strict=True)]
    plans = [f"buckets of plan {step.plan:016x}" for step in steps]
    sides = tell_sides(texts, ranks=ranks) or tell_sides(plans, ranks=ranks)
    counts = "; ".join(
        f"rank {rank}: {row[1]} synchronising, {row[2]} under no_sync" for rank, row in zip(ranks, rows, strict=True)
    )
    return OutOfStepError(
        f"ranks are out of step, and nothing of this step was communicated. Next comes {sides}. Forwards so far: "
        f"{counts}. Every rank must run the same forwards that communicate and the same synchronising backward passes: "
        "look for a step or backward pass on some ranks only, an exception that was caught, evaluation on one rank "
        "(call wrapper.module there), or no_sync on some ranks only"
    )
