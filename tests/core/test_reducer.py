import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unified_ddp import ParamSpec, PlanError, ReadinessError, plan_in_ready_order
from unified_ddp.reducer import Phase, Reducer


class FailedOnPurpose(Exception):
    """What the fake backend raises."""


class FakeReduction:
    def __init__(self, backend: "FakeBackend", bucket: int) -> None:
        self.backend, self.bucket = backend, bucket

    def result(self) -> str:
        self.backend.say("result", self.bucket)
        return f"reduced {self.bucket}"


class FakeBackend:
    """Writes down what it is told, and fails at one point if asked to."""

    def __init__(self) -> None:
        self.log: list[tuple[str, Any]] = []
        self.fails_at: tuple[str, Any] | None = None

    def say(self, what: str, which: Any) -> None:
        self.log.append((what, which))
        if self.fails_at == (what, which):
            raise FailedOnPurpose(what)

    def pack_param(self, param: int) -> None:
        self.say("pack", param)

    def launch(self, bucket: int) -> FakeReduction:
        self.say("launch", bucket)
        return FakeReduction(self, bucket)

    def all_launched(self) -> None:
        self.say("all_launched", None)

    def unpack(self, bucket: int, reduced: str) -> None:
        assert reduced == f"reduced {bucket}"
        self.say("unpack", bucket)

    def failure(self, bucket: int, error: RuntimeError) -> Exception:
        return ConnectionError(f"bucket {bucket}: {error}")


PARAMS = [ParamSpec(f"p{i}", [1], "float32") for i in range(6)]
PLAN = plan_in_ready_order(PARAMS, [8])  # buckets (5, 4), (3, 2), (1, 0)
ONCE = bytes([1]) * 6


def make(start: Callable[[], None] = lambda: None, eager: list[bool] | None = None) -> tuple[Reducer, FakeBackend]:
    backend = FakeBackend()
    return Reducer(PLAN, backend, start, eager), backend


def whole_pass(reducer: Reducer) -> None:
    reducer.begin(ONCE)
    for param in range(6):
        reducer.hook(param)(object())
    reducer.finish()


WHOLE = [("launch", b) for b in range(3)] + [("all_launched", None)]
WHOLE += [(what, b) for b in range(3) for what in ("result", "unpack")]


@settings(deadline=None)
@given(
    st.permutations(range(6)), st.lists(st.sampled_from([0, 1, 2]), min_size=6, max_size=6), st.sets(st.integers(0, 5))
)
def test_one_pass(order: list[int], arrival: list[int], eager: set[int]) -> None:
    reducer, backend = make(eager=[i in eager for i in range(6)])
    reducer.begin(bytes(arrival))
    came = [i for i in order if arrival[i] == 1]
    for param in came:
        reducer.hook(param)(object())
    assert reducer.ready_order == tuple(came)
    reducer.finish()
    assert [entry for entry in backend.log if entry[0] != "pack"] == WHOLE
    assert [param for what, param in backend.log if what == "pack"] == [i for i in came if i in eager]
    assert (reducer.phase, reducer.launched) == (Phase.IDLE, 3)
    assert not any(reducer.touched(i) for i in range(6))
    assert [reducer.seen(i) for i in range(6)] == [i in came for i in range(6)]


def test_the_first_gradient_starts_the_pass_while_armed() -> None:
    reducer, backend = make(lambda: reducer.begin(ONCE))
    reducer.hook(0)(object())
    assert reducer.phase == Phase.IDLE
    reducer.arm()
    for _ in range(2):
        for param in range(6):
            reducer.hook(param)(object())
        reducer.finish()
        assert reducer.phase == Phase.ARMED
    assert backend.log == WHOLE * 2
    reducer.arm(False)
    reducer.hook(0)(object())
    assert reducer.touched(0)
    assert reducer.phase == Phase.IDLE


@pytest.mark.parametrize("point", sorted({*WHOLE, ("pack", 3)}, key=str))
def test_a_failure_leaves_it_usable(point: tuple[str, Any]) -> None:
    reducer, backend = make(eager=[False, False, False, True, False, False])
    backend.fails_at = point
    with pytest.raises(FailedOnPurpose):
        whole_pass(reducer)
    if reducer.phase == Phase.ACTIVE:  # raised in a hook: the pass cannot end as if it were whole
        with pytest.raises(ReadinessError, match="after an error"):
            reducer.finish()
    assert reducer.phase == Phase.IDLE
    waited = [bucket for what, bucket in backend.log if what == "result"]
    launched = [bucket for what, bucket in backend.log if what == "launch" and point != (what, bucket)]
    assert waited == launched
    backend.fails_at, backend.log = None, []
    whole_pass(reducer)
    assert [entry for entry in backend.log if entry[0] != "pack"] == WHOLE


def test_abort_waits_for_all_and_drops_errors() -> None:
    reducer, backend = make()
    reducer.begin(ONCE)
    for param in (5, 4, 3, 2):
        reducer.hook(param)(object())
    backend.fails_at = ("result", 0)
    reducer.abort()
    assert backend.log[2:] == [("result", 0), ("result", 1)]
    assert all(reducer.touched(i) for i in (5, 4, 3, 2))
    reducer.abort()
    assert len(backend.log) == 4


def test_begin_twice_is_refused_and_drops_nothing() -> None:
    reducer, backend = make()
    reducer.begin(bytes([2]) * 6)
    with pytest.raises(ReadinessError, match="is being reduced already"):
        reducer.begin(ONCE)
    reducer.finish()
    assert backend.log == WHOLE


def test_finish_outside_a_pass() -> None:
    with pytest.raises(ReadinessError, match="outside a backward pass"):
        make()[0].finish()


def test_rebucket() -> None:
    reducer, backend = make()
    other = plan_in_ready_order(PARAMS, [4], [0, 1, 2, 3, 4, 5])
    reducer.rebucket(other)
    whole_pass(reducer)
    assert [b for what, b in backend.log if what == "launch"] == list(range(6))
    with pytest.raises(PlanError, match="over other parameters"):
        reducer.rebucket(plan_in_ready_order(PARAMS[::-1], [4]))
    reducer.begin()
    with pytest.raises(ReadinessError, match="cannot change during a backward pass"):
        reducer.rebucket(PLAN)
    assert reducer.plan is other


def test_hooks_do_not_keep_the_reducer_alive() -> None:
    reducer, backend = make()
    hooks = [reducer.hook(i) for i in range(6)]
    backend.owner = reducer  # type: ignore[attr-defined]
    gone = weakref.ref(reducer)
    del reducer, backend
    gc.collect()
    assert gone() is None
    hooks[0](object())
