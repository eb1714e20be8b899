"""Waiting for steps: how many may be in flight, and for how long."""

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import jax

from unified_ddp.errors import StallError
from unified_ddp.jax.step.processes import ProgressBoard


class Deadline:
    """Makes calls that may wait for other processes, in a thread of its own: this one can then give up.

    `name`, for errors and for the board, is the same in all processes; `timeout` is in seconds.
    """

    def __init__(self, name: str, timeout: float) -> None:
        self._name = name
        self._timeout = timeout
        self._board = ProgressBoard(name)
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(self._calls,), daemon=True, name=f"unified_ddp {name}").start()
        weakref.finalize(self, self._calls.put, None)

    def __call__(self, call: Callable[[], Any], step: int) -> Any:
        """Returns what the call returns.

        Raises:
            StallError: it has not returned in time.
        """
        future: Future[Any] = Future()
        self._calls.put((future, call))
        patience = min(1.0, self._timeout / 4)
        if not wait([future], patience).done:
            self._board.report(step)  # here, as opposed to those who do not come; written in no step that runs well
            if not wait([future], self._timeout - patience).done:
                raise StallError(self._stalled(step))
        return future.result()

    def _stalled(self, step: int) -> str:
        behind = self._board.behind(step)
        if behind is None:
            who = "which process has not come to it is not known, as this version of JAX hides its key-value store"
        else:
            told = [
                f"process {process} has not come to it"
                + (f" (it last waited long for step {last})" if last is not None else "")
                for process, last in behind.items()
            ]
            who = "; ".join(told) or "all processes wait for it: a collective or a device is stuck"
        return (
            f"{self._name}, step {step} (the calls of this process, from 0), has not ended within "
            f"{self._timeout:g} s: {who}. Every process must call the step equally often; one that has no data left "
            "passes a batch of weight 0, see unified_ddp.jax.pad_batch. timeout= sets the time."
        )


def _serve(calls: "queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]") -> None:
    while (item := calls.get()) is not None:
        future, call = item
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        del item, future, call  # they hold arrays


class InFlight:
    """Bounds the number of steps that were dispatched and have not ended.

    Args:
        limit: how many there may be when `add` returns.
        deadline: None waits for ever.
        ended: called once a step has ended, in order, with its number and result.
    """

    def __init__(self, limit: int, deadline: Deadline | None, ended: Callable[[int, Any], None]) -> None:
        self._limit = limit
        self._deadline = deadline
        self._ended = ended
        self._steps: deque[tuple[int, Any]] = deque()

    def add(self, step: int, result: Any) -> None:
        """Takes a dispatched step's result, and waits for the oldest steps if there are too many."""
        self._steps.append((step, result))
        self._wait(self._limit)

    def wait(self) -> None:
        """Waits for all steps."""
        self._wait(0)

    def _wait(self, limit: int) -> None:
        while len(self._steps) > limit:
            step, result = self._steps.popleft()
            if self._deadline is None:
                jax.block_until_ready(result)
            else:
                self._deadline(lambda result=result: jax.block_until_ready(result), step)  # type: ignore[misc]
            self._ended(step, result)
