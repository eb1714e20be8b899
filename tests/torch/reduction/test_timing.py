"""The moments of an iteration, and the durations between them."""

import pytest
import torch

from unified_ddp.torch.reduction import timing
from unified_ddp.torch.reduction.timing import Moment, StepTimer, durations

CPU = torch.device("cpu")
NAMES = [timing.FORWARD_START, timing.BACKWARD_START, timing.COMM_START, timing.BACKWARD_END, timing.COMM_END]


def test_only_sampled_iterations_are_recorded() -> None:
    timer = StepTimer(CPU)
    timer.mark(timing.BACKWARD_START)
    assert timer.moments == {}
    timer.begin(False)
    assert timer.moments == {}
    timer.begin(True)
    assert list(timer.moments) == [timing.FORWARD_START]


def test_the_first_moment_of_a_name_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100, 200))
    monkeypatch.setattr(timing.time, "time_ns", lambda: next(clock))
    timer = StepTimer(CPU)
    timer.begin(True)
    for name in [*NAMES, *NAMES]:
        timer.mark(name)
    assert {name: moment.host for name, moment in timer.moments.items()} == dict(
        zip(NAMES, range(100, 105), strict=True)
    )
    timer.begin(True)
    assert {name: moment.host for name, moment in timer.moments.items()} == {timing.FORWARD_START: 105}


def test_durations_on_the_host() -> None:
    moments = {name: Moment(at) for name, at in zip(NAMES, (10, 30, 35, 60, 80), strict=True)}
    assert durations(moments) == {
        "forward_compute_time": 20,
        "backward_compute_time": 30,
        "backward_comm_time": 45,
        "backward_compute_comm_overlap_time": 25,
    }
    assert durations({}) == {}
    del moments[timing.COMM_START]
    assert set(durations(moments)) == {"forward_compute_time", "backward_compute_time"}


def test_none_is_negative() -> None:
    """The clock may be set back, and communication may start when the backward pass has ended."""
    moments = {name: Moment(at) for name, at in zip(NAMES, (10, 30, 65, 60, 80), strict=True)}
    assert durations(moments)["backward_compute_comm_overlap_time"] == 0


class Event:
    def __init__(self, at: float) -> None:
        self.at, self.waited = at, False

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, other: "Event") -> float:
        assert self.waited
        assert other.waited
        return other.at - self.at


def test_durations_on_a_device() -> None:
    moments = {name: Moment(0, Event(at)) for name, at in zip(NAMES, (1.0, 3.5, 3.75, 3.625, 9.0), strict=True)}
    assert durations(moments) == {
        "forward_compute_time": 2_500_000,
        "backward_compute_time": 125_000,
        "backward_comm_time": 5_250_000,
        "backward_compute_comm_overlap_time": 0,
    }
