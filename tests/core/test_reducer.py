import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unified_ddp import (
    BucketPlan,
    ParamSpec,
    PlanError,
    ReadinessError,
    ReductionError,
    UnusedParameterError,
    plan_in_ready_order,
)
from unified_ddp.passes import Pass, PassKind
from unified_ddp.ranks.control import Control
from unified_ddp.ranks.progress import Progress
from unified_ddp.reducer import Phase, Reducer
from unified_ddp.usage import Usage


class FailedOnPurpose(Exception):
    """What the fake backend raises."""


class FakeReduction:
    def __init__(self, backend: "FakeBackend", bucket: int) -> None:
        self.backend, self.bucket = backend, bucket

    def result(self) -> str:
        self.backend.say("result", self.bucket)
        return f"reduced {self.bucket}"


class FakeCounting:
    def __init__(self, counts: list[int]) -> None:
        self.counts = counts

    def wait(self) -> None: ...

    def result(self) -> list[int]:
        return self.counts


class FakeBackend:
    """Writes down what it is told, and fails at one point if asked to."""

    def __init__(self) -> None:
        self.log: list[tuple[str, Any]] = []
        self.fails_at: tuple[str, Any] | None = None
        self.without: set[int] = set()
        """Parameters that have no gradient."""
        self.elsewhere = [0] * 6
        """By parameter, on how many other ranks it is used."""
        self.kept: dict[int, set[int]] = {}
        self.half_reduced: list[str] = []

    def say(self, what: str, which: Any) -> None:
        self.log.append((what, which))
        if self.fails_at == (what, which):
            raise FailedOnPurpose(what)

    def begin(self, number: int, kind: PassKind, plan: BucketPlan) -> Pass:
        return Pass(number, kind, plan)

    def has_gradient(self, current: Pass, param: int) -> bool:
        return param not in self.without

    def count_used(self, used: Sequence[bool]) -> FakeCounting:
        self.say("count", tuple(used))
        return FakeCounting([a + b for a, b in zip(used, self.elsewhere, strict=True)])

    def pack_param(self, current: Pass, param: int) -> None:
        self.say("pack one", param)

    def pack(self, current: Pass, bucket: int) -> None:
        self.say("pack", bucket)

    def launch(self, current: Pass, bucket: int) -> FakeReduction:
        self.say("launch", bucket)
        return FakeReduction(self, bucket)

    def unpack(self, current: Pass, bucket: int, reduced: str, keep: set[int]) -> None:
        assert reduced == f"reduced {bucket}"
        self.kept[bucket] = keep
        self.say("unpack", bucket)

    def failure(self, bucket: int, error: RuntimeError) -> Exception:
        return ConnectionError(f"bucket {bucket}: {error}")

    def end(self, current: Pass) -> None:
        self.say("end", None)

    def frozen(self) -> list[int]:
        return []

    def lost(self, current: Pass) -> list[str]:
        return self.half_reduced


class FakeGroup:
    """Two ranks; the other gives the answer that it was told to give."""

    name, rank, world_size = "fake", 0, 2

    def __init__(self) -> None:
        self.other: int | None = None

    def all_gather_ints(self, value: int) -> list[int]:
        return [value, value if self.other is None else self.other]

    def all_gather_text(self, text: str) -> list[str]:
        return [text, text]


PARAMS = [ParamSpec(f"p{i}", [1], "float32") for i in range(6)]
PLAN = plan_in_ready_order(PARAMS, [8])  # buckets (5, 4), (3, 2), (1, 0)
ONCE = bytes([1]) * 6


def make(
    start: Callable[[], None] = lambda: None,
    eager: list[bool] | None = None,
    *,
    group: FakeGroup | None = None,
    find_unused: bool = False,
    static: bool = False,
    skip_unused: bool = False,
) -> tuple[Reducer, FakeBackend]:
    backend = FakeBackend()
    usage = Usage([p.name for p in PARAMS], (), find_unused=find_unused, static=static)
    progress = Progress(group or FakeGroup(), lambda: None)
    control = Control(lambda: None, progress)
    reducer = Reducer(
        PLAN, backend, start, usage=usage, progress=progress, control=control, eager=eager, skip_unused=skip_unused
    )
    return reducer, backend


def whole_pass(reducer: Reducer) -> None:
    reducer.begin(arrival=ONCE)
    for param in range(6):
        reducer.hook(param)(object())
    reducer.finish()


WHOLE: list[tuple[str, Any]] = [(what, b) for b in range(3) for what in ("pack", "launch")]
WHOLE += [(what, b) for b in range(3) for what in ("result", "unpack")]
WHOLE += [("end", None)]


@settings(deadline=None)
@given(st.permutations(range(6)), st.lists(st.sampled_from([0, 1]), min_size=6, max_size=6), st.sets(st.integers(0, 5)))
def test_one_pass(order: list[int], arrival: list[int], eager: set[int]) -> None:
    reducer, backend = make(eager=[i in eager for i in range(6)])
    current = reducer.begin(arrival=bytes(arrival))
    came = [i for i in order if arrival[i] == 1]
    for param in came:
        reducer.hook(param)(object())
    reducer.finish()
    assert current.order == tuple(came)
    assert [entry for entry in backend.log if entry[0] != "pack one"] == WHOLE
    assert [param for what, param in backend.log if what == "pack one"] == [i for i in came if i in eager]
    assert (reducer.phase, current.launched, current.number) == (Phase.IDLE, 3, 1)
    assert not any(reducer.touched(i) for i in range(6))
    assert [reducer.seen(i) for i in range(6)] == [i in came for i in range(6)]


def test_the_first_gradient_starts_the_pass_while_armed() -> None:
    reducer, backend = make(lambda: reducer.begin(arrival=ONCE))
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


@pytest.mark.parametrize("point", sorted({*WHOLE[:-1], ("pack one", 3)}, key=str))
def test_a_failure_leaves_it_usable(point: tuple[str, Any]) -> None:
    reducer, backend = make(eager=[False, False, False, True, False, False])
    backend.fails_at = point
    with pytest.raises(FailedOnPurpose):
        whole_pass(reducer)
    if reducer.phase == Phase.ACTIVE:  # raised in a hook: the pass cannot end as if it were whole
        with pytest.raises(ReadinessError, match="after an error"):
            reducer.finish()
    elif point[0] in ("pack", "pack one"):
        pytest.fail("an error in a hook must not end the pass")
    assert reducer.phase == Phase.IDLE
    waited = [bucket for what, bucket in backend.log if what == "result"]
    launched = [bucket for what, bucket in backend.log if what == "launch" and point != (what, bucket)]
    assert waited == launched
    backend.fails_at, backend.log = None, []
    whole_pass(reducer)
    assert [entry for entry in backend.log if entry[0] != "pack one"] == WHOLE


def begin_and_mark(reducer: Reducer, *params: int) -> Pass:
    current: Pass = reducer.begin(arrival=ONCE)
    for param in params:
        reducer.hook(param)(object())
    return current


def test_giving_up_waits_for_all_and_drops_errors() -> None:
    reducer, backend = make()
    begin_and_mark(reducer, 5, 4, 3, 2)
    backend.fails_at = ("result", 0)
    reducer.give_up()
    assert backend.log[4:] == [("result", 0), ("result", 1)]
    assert all(reducer.touched(i) for i in (5, 4, 3, 2))
    reducer.drop()
    assert len(backend.log) == 6


def test_gradients_half_reduced_are_named() -> None:
    reducer, backend = make()
    begin_and_mark(reducer, 5, 4)
    backend.half_reduced = ["p5", "p4"]
    with pytest.raises(ReductionError, match="gradients of p5, p4 are neither local nor reduced"):
        reducer.give_up()


@pytest.mark.parametrize("elsewhere", [(1, 1), (1, 2), (2, 1)])
def test_ranks_agree_on_what_was_given_up(elsewhere: tuple[int, int]) -> None:
    number, buckets = elsewhere
    group = FakeGroup()
    group.other = number << 32 | buckets
    reducer, _ = make(group=group)
    begin_and_mark(reducer, 5, 4)
    reducer.give_up()
    if elsewhere == (1, 1):
        reducer.begin()
        return
    with pytest.raises(ReductionError, match=f"rank 0: pass 1 after 1 buckets; rank 1: pass {number} after {buckets}"):
        reducer.begin()
    assert reducer.phase is Phase.IDLE


def test_a_pass_taken_back_is_not_counted() -> None:
    reducer, backend = make()
    reducer.begin()
    reducer.cancel()
    assert reducer.begin().number == 1
    assert backend.log == []


def test_begin_twice_is_refused_and_drops_nothing() -> None:
    reducer, backend = make()
    reducer.begin()
    with pytest.raises(ReadinessError, match="is being reduced already"):
        reducer.begin(arrival=ONCE)
    reducer.finish()
    assert backend.log == WHOLE


def test_what_no_rank_used_is_left_alone() -> None:
    reducer, backend = make(find_unused=True)
    backend.elsewhere = [1, 0, 0, 0, 0, 0]
    begin_and_mark(reducer, 5, 4, 3)  # not 0, used by the other rank; nor 1 and 2, used by none
    reducer.finish()
    assert backend.log.count(("count", (False, False, False, True, True, True))) == 1
    assert backend.kept == {0: set(), 1: {1}, 2: {0}}


def test_a_parameter_reached_without_a_gradient_is_unused() -> None:
    reducer, backend = make(find_unused=True)
    backend.without = {5}
    begin_and_mark(reducer, *range(6))
    reducer.finish()
    assert backend.kept == {0: {0}, 1: set(), 2: set()}


def test_buckets_that_no_rank_used_are_left_out() -> None:
    reducer, backend = make(find_unused=True, skip_unused=True)
    backend.elsewhere = [0, 0, 1, 0, 0, 0]
    current = reducer.begin(used=[False] * 4 + [True] * 2)
    for param in (5, 4):
        reducer.hook(param)(object())
    reducer.finish()
    assert [bucket for what, bucket in backend.log if what == "launch"] == [0, 1]
    assert backend.kept == {0: set(), 1: {0}}
    assert current.launched == 2


def test_a_shadow_takes_part_and_leaves_gradients_alone() -> None:
    reducer, backend = make(find_unused=True)
    reducer.mark(3)  # accumulated before
    reducer.begin(PassKind.SHADOW)
    reducer.finish()
    assert [entry for entry in backend.log if entry[0] == "launch"] == [("launch", b) for b in range(3)]
    assert not {what for what, _ in backend.log} & {"pack", "unpack"}
    assert ("count", (False,) * 6) in backend.log
    assert reducer.touched(3)


def test_what_was_accumulated_is_no_iteration() -> None:
    reducer, backend = make()
    reducer.begin(PassKind.ACCUMULATED, used=[True] * 5 + [False])
    reducer.finish()
    assert backend.kept == {0: {0}, 1: set(), 2: set()}
    assert not reducer.usage.under_way


def test_a_static_graph_that_grows() -> None:
    reducer, backend = make(static=True)
    backend.without = {0}
    begin_and_mark(reducer, 1, 2, 3, 4, 5)
    reducer.finish()
    reducer.usage.next_iteration(0)
    assert reducer.usage.known == [0, 1, 1, 1, 1, 1]
    whole = begin_and_mark(reducer, 1, 2, 3, 4, 5)
    reducer.finish()
    assert whole.counting is None
    assert backend.kept[2] == {1}
    reducer.usage.next_iteration(0)
    backend.without = set()
    with pytest.raises(UnusedParameterError, match="did not use got a gradient"):
        whole_pass(reducer)
    assert backend.kept[2] == set()


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
