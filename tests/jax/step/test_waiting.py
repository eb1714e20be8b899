"""How many steps may be under way, and who did not come to one."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from jax_cases import loss_fn, make_batch, make_params
from step_cases import make_step

from unified_ddp.errors import StallError
from unified_ddp.jax.step import waiting

pytestmark = pytest.mark.timeout(120)


def test_many_steps_without_waiting() -> None:
    """Unbounded, some hundred steps in flight abort the process."""
    params, batch = make_params(), make_batch()
    step = make_step(params, loss_fn, 4)
    state = step.init(params)
    for _ in range(500):
        state, loss = step(state, batch)
        assert loss.is_ready()
    assert int(state.step) == 500


def test_steps_in_flight_are_bounded() -> None:
    params, batch = make_params(), make_batch()
    step = make_step(params, loss_fn, 2, max_in_flight=1)
    state, losses = step.init(params), []
    for _ in range(10):
        state, loss = step(state, batch)
        losses.append(loss)
        assert all(loss.is_ready() for loss in losses[:-1])
    step.wait()
    assert losses[-1].is_ready()


@pytest.mark.parametrize(
    ("behind", "told"),
    [
        (
            {1: None, 3: 2},
            r"process 1 has not come to it; process 3 has not come to it \(it last waited long for step 2\)",
        ),
        ({}, "all processes wait for it: a collective or a device is stuck"),
        (None, "which process has not come to it is not known, as this version of JAX hides its key-value store"),
    ],
)
def test_a_call_that_does_not_end(monkeypatch: pytest.MonkeyPatch, behind: Any, told: str) -> None:
    reported: list[int] = []
    board = SimpleNamespace(report=reported.append, behind=lambda step: behind)
    monkeypatch.setattr(waiting, "ProgressBoard", lambda name: board)
    ended = threading.Event()
    message = (
        rf"^train_step 7, step 4 \(the calls of this process, from 0\), has not ended within 0\.2 s: {told}\. Every"
    )
    with pytest.raises(StallError, match=message):
        waiting.Deadline("train_step 7", 0.2)(ended.wait, 4)
    ended.set()
    assert reported == [4]


def test_what_a_call_gives_and_raises() -> None:
    deadline = waiting.Deadline("train_step 8", 60)
    assert deadline(lambda: 3, 0) == 3
    with pytest.raises(ZeroDivisionError):
        deadline(lambda: 1 // 0, 1)
