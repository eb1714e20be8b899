"""What ranks announce, and what is said of ranks out of step; with planes that are lists."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from unified_ddp import OutOfStepError, ReductionError
from unified_ddp.ranks.control import Control, Does, Event, Step
from unified_ddp.ranks.progress import Progress


class Two:
    """Two ranks, of which the other announces what it was told to."""

    name, rank, world_size, global_ranks = "test of control", 0, 2, (0, 1)

    def __init__(self) -> None:
        self.gathered: list[int] = []

    def all_gather_ints(self, value: int) -> list[int]:
        return [value, *self.gathered] if self.gathered else [value, value]

    def all_gather_text(self, text: str) -> list[str]:
        return [text, text]


class FakePlane:
    def __init__(self) -> None:
        self.mine: list[list[int]] = []
        self.other: Any = None

    def start(self, values: Sequence[int]) -> "FakePlane":
        self.mine.append(list(values))
        return self

    def result(self, look: Callable[[], None]) -> list[list[int]]:
        mine = self.mine[-1]
        return [mine, mine if self.other is None else self.other(mine)]


def make() -> tuple[Control, FakePlane, Progress]:
    plane, progress = FakePlane(), Progress(Two(), lambda: None)  # type: ignore[arg-type]
    return Control(lambda: plane, progress), plane, progress


def other_step(step: Step, wrapper: int = 0) -> Any:
    """As another rank's announcement, of a wrapper so many numbers behind."""
    fields = (step.event, step.passes, step.forward, step.repeat, step.does, step.plan)
    return lambda mine: [mine[0] + wrapper, 7, 5, *map(int, fields)]


BACKWARD = Step(Event.BACKWARD, 3, 3, 1, plan=12)


def test_equal_steps_pass_and_counts_of_forwards_may_differ() -> None:
    control, plane, _ = make()
    plane.other = other_step(BACKWARD)
    control.announce(BACKWARD)
    control.settle("phase", "detail")
    control.settle("phase", "detail")  # nothing was announced since
    assert len(plane.mine) == 1


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (Step(Event.BACKWARD, 4, 3, 1, plan=12), ["synchronising backward pass 3", "synchronising backward pass 4"]),
        (Step(Event.BACKWARD, 3, 2, 2, plan=12), ["pass 1 through the outputs of synchronising forward 3", "pass 2"]),
        (Step(Event.BACKWARD, 3, 0, 0, plan=12), ["that passes no output of the wrapper"]),
        (
            Step(Event.BACKWARD, 3, 3, 1, plan=13),
            ["buckets of plan 000000000000000c", "buckets of plan 000000000000000d"],
        ),
        (Step(Event.ACCUMULATED, 3), ["sync_gradients(), after 3 reductions,"]),
        (Step(Event.CHECK, 2), ["check_replicas(), after 2 reductions,"]),
        (Step(Event.AFTER_EXCEPTION, 3, repeat=2), ["what follows an exception in pass 3 after 2 buckets"]),
        (Step(Event.FORWARD, 2, does=Does.SYNCS_BUFFERS), ["a forward (broadcasts buffers)", "that is synchronising"]),
        (Step(Event.FORWARD, 2, does=Does.IS_LOCAL), ["that is under no_sync"]),
        (Step(Event.FORWARD, 2, does=Does.RECORDS_NOTHING), ["that is without gradients"]),
    ],
    ids=str,
)
def test_other_steps_are_named(theirs: Step, said: list[str]) -> None:
    control, plane, _ = make()
    plane.other = other_step(theirs)
    control.announce(BACKWARD)
    with pytest.raises(OutOfStepError) as caught:
        control.settle("phase", "detail")
    message = str(caught.value)
    for words in ("ranks are out of step", "on rank 0", "on rank 1", "rank 1: 7 synchronising, 5 under no_sync", *said):
        assert words in message


@pytest.mark.parametrize("does", [flag for flag in Does if flag not in (Does.IS_LOCAL, Does.RECORDS_NOTHING)], ids=str)
def test_everything_that_a_forward_does_has_words(does: Does) -> None:
    plain = Step(Event.FORWARD, 1).text()
    assert Step(Event.FORWARD, 1, does=does).text() != plain


def test_another_wrapper_is_told_apart() -> None:
    control, plane, progress = make()
    plane.other = other_step(BACKWARD, wrapper=1)
    control.announce(BACKWARD)
    with pytest.raises(OutOfStepError, match=f"of wrapper {progress.wrapper + 1} on these ranks"):
        control.settle("phase", "detail")


@pytest.mark.parametrize("theirs", [(3, 2), (4, 1)])
def test_passes_given_up_at_different_points(theirs: tuple[int, int]) -> None:
    expected = f"rank 0: pass 3 after 1 buckets; rank 1: pass {theirs[0]} after {theirs[1]} buckets"
    control, plane, progress = make()
    plane.other = other_step(Step(Event.AFTER_EXCEPTION, theirs[0], repeat=theirs[1]))
    with pytest.raises(ReductionError, match=expected):
        control.agree(3, 1)
    # without a plane, over the ranks' own connections
    progress._group.gathered = [theirs[0] << 32 | theirs[1]]  # type: ignore[attr-defined]
    with pytest.raises(ReductionError, match=expected):
        Control(lambda: None, progress).agree(3, 1)


def test_nothing_is_announced_while_paused_or_without_a_plane() -> None:
    control, plane, progress = make()
    control.is_paused = True
    control.announce(BACKWARD)
    control.settle("phase", "detail")
    assert plane.mine == []
    Control(lambda: None, progress).announce(BACKWARD)


def test_a_rank_that_does_not_come_is_named_as_everywhere() -> None:
    control, plane, _ = make()

    def fail(mine: list[int]) -> list[int]:
        raise RuntimeError("timed out")

    plane.other = fail
    control.announce(BACKWARD)
    with pytest.raises(
        ReductionError, match="synchronising backward pass 3, before bucket 0, failed on rank 0: timed out"
    ):
        control.settle("synchronising backward pass 3", "before bucket 0")


def test_ranks_that_are_others_are_connected_to_anew() -> None:
    planes = [FakePlane(), FakePlane()]
    control = Control(iter(planes).__next__, Progress(Two(), lambda: None))  # type: ignore[arg-type]
    for _ in range(2):
        control.announce(BACKWARD)
        control.settle("phase", "detail")
        control.connect_anew()
    assert [len(plane.mine) for plane in planes] == [1, 1]
