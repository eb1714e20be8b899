import gc
import weakref
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.readiness_model import ReadinessModel, Refused

from unified_ddp import PlanError, ReadinessError
from unified_ddp._core import Phase, Readiness


class CallbackError(Exception):
    """What a callback of the test raises."""


class ReadinessAgainstModel(RuleBasedStateMachine):
    """Does the same to `Readiness` and to its model, and compares all that can be seen."""

    @initialize(data=st.data(), size=st.integers(1, 8))
    def make(self, data: st.DataObject, size: int) -> None:
        self.size = size
        buckets = self._draw_buckets(data)
        self.eager = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
        self.arrival = bytes(size)
        self.starts = True
        self.nested: list[int] = []
        self.raises = False
        self.real_log: list[object] = []
        self.model_log: list[object] = []
        names = [f"p{i}" for i in range(size)]
        self.real = Readiness(names, buckets, self.eager, *self._callbacks(lambda: self.real, self.real_log))
        self.model = ReadinessModel(buckets, *self._callbacks(lambda: self.model, self.model_log))
        self.model.eager = {i for i, eager in enumerate(self.eager) if eager}

    def _draw_buckets(self, data: st.DataObject) -> list[list[int]]:
        order = data.draw(st.permutations(range(self.size)))
        cuts = sorted(data.draw(st.sets(st.integers(1, self.size - 1)))) if self.size > 1 else []
        return [order[a:b] for a, b in zip([0, *cuts], [*cuts, self.size], strict=True)]

    def _callbacks(self, subject: Callable, log: list[object]) -> tuple[Callable, Callable, Callable]:
        def start() -> None:
            log.append("start")
            if self.starts:
                subject().begin(self.arrival)

        def bucket(index: int) -> None:
            log.append(("bucket", index))
            for param in self.nested:
                subject().mark(param)
            if self.raises:
                raise CallbackError

        def param(index: int) -> None:
            log.append(("param", index))

        return start, bucket, param

    def _both(self, real: Callable, model: Callable) -> None:
        outcomes = []
        for act in (real, model):
            try:
                act()
                outcomes.append("done")
            except (ReadinessError, Refused):
                outcomes.append("refused")
            except CallbackError:
                outcomes.append("callback")
        assert outcomes[0] == outcomes[1]

    @rule(data=st.data(), starts=st.booleans(), raises=st.sampled_from([False] * 9 + [True]))
    def script(self, data: st.DataObject, starts: bool, raises: bool) -> None:
        """Says what the callbacks will do from now on."""
        arrivals = st.lists(st.sampled_from([1, 1, 1, 0]), min_size=self.size, max_size=self.size)
        self.arrival = bytes(data.draw(arrivals))
        self.starts, self.raises = starts, raises
        self.nested = data.draw(st.lists(st.integers(0, self.size - 1), max_size=2))

    @rule(sync=st.booleans())
    def arm(self, sync: bool) -> None:
        self._both(self.real.arm if sync else self.real.disarm, lambda: self.model.arm(sync))

    @rule()
    def begin(self) -> None:
        self._both(lambda: self.real.begin(self.arrival), lambda: self.model.begin(self.arrival))

    @rule(data=st.data())
    def mark(self, data: st.DataObject) -> None:
        param = data.draw(st.integers(0, self.size - 1))
        self._both(lambda: self.real.hook(param)(object()), lambda: self.model.mark(param))

    @precondition(lambda self: self.model.phase == "ACTIVE" and not self.model.failed)
    @rule(data=st.data())
    def mark_the_rest(self, data: st.DataObject) -> None:
        rest = [i for i in range(self.size) if i not in self.model.order and self.arrival[i] == 1]
        for param in data.draw(st.permutations(rest)):
            self._both(lambda p=param: self.real.mark(p), lambda p=param: self.model.mark(p))  # type: ignore[misc]

    @rule()
    def flush(self) -> None:
        self._both(self.real.flush, self.model.flush)

    @rule()
    def end(self) -> None:
        self._both(self.real.end, self.model.end)

    @rule()
    def abort(self) -> None:
        self._both(self.real.abort, self.model.abort)

    @rule(data=st.data())
    def rebucket(self, data: st.DataObject) -> None:
        buckets = self._draw_buckets(data)
        self._both(lambda: self.real.rebucket(buckets), lambda: self.model.rebucket(buckets))

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "real"):
            return
        assert self.real_log == self.model_log
        assert self.real.phase.name == self.model.phase
        assert list(self.real.order) == self.model.order
        everyone = range(self.size)
        assert {i for i in everyone if self.real.touched(i)} == self.model.touched
        assert {i for i in everyone if self.real.seen(i)} == set(self.model.order)


ReadinessAgainstModel.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
TestReadinessAgainstModel = ReadinessAgainstModel.TestCase


def make(
    on_bucket: Callable = lambda bucket: None, eager: bool = False, on_param: Callable = lambda p: None
) -> Readiness:
    return Readiness(["a", "b", "c"], [[2], [1, 0]], [eager] * 3, lambda: None, on_bucket, on_param)


def test_buckets_launch_in_order_whatever_comes_first() -> None:
    launched: list[int] = []
    readiness = make(launched.append)
    readiness.begin(b"\1\1\1")
    readiness.mark(0)
    readiness.mark(1)
    assert launched == []
    readiness.mark(2)
    assert launched == [0, 1]
    assert readiness.order == (0, 1, 2)
    readiness.end()


def test_a_late_gradient_is_named() -> None:
    readiness = make()
    readiness.begin(b"\1\1\1")
    readiness.mark(2)
    with pytest.raises(ReadinessError, match="'c' got another gradient after its bucket was launched"):
        readiness.mark(2)
    with pytest.raises(ReadinessError, match="after an error in this backward pass"):
        readiness.flush()
    readiness.abort()
    readiness.begin(b"\1\1\1")
    readiness.flush()
    readiness.end()


def test_an_eager_parameter_that_comes_twice_is_named() -> None:
    packed: list[int] = []
    readiness = make(eager=True, on_param=packed.append)
    readiness.begin(b"\1\1\1")
    readiness.mark(1)
    with pytest.raises(ReadinessError, match="'b' got another gradient after it was packed"):
        readiness.mark(1)
    assert packed == [1]


def test_a_gradient_that_comes_while_flushing_does_not_hold_its_bucket_back() -> None:
    launched: list[int] = []

    def on_bucket(bucket: int) -> None:
        launched.append(bucket)
        if bucket == 0:
            readiness.mark(1)

    readiness = make(on_bucket)
    readiness.begin(b"\1\1\1")
    readiness.flush()
    readiness.end()
    assert launched == [0, 1]


def test_abort_and_new_pass_from_inside_a_callback() -> None:
    launched: list[int] = []

    def on_param(param: int) -> None:
        readiness.abort()
        readiness.rebucket([[0, 1, 2]])
        readiness.begin(b"\1\1\1")

    readiness = make(launched.append, eager=True, on_param=on_param)
    readiness.begin(b"\1\1\1")
    readiness.mark(2)
    assert readiness.order == ()
    assert launched == []
    assert readiness.phase == Phase.ACTIVE


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda r: r.begin(b"\1"), ReadinessError, "told of 1 parameters, but there are 3"),
        (lambda r: r.begin(b"\1\2\1"), ReadinessError, "'b' was given the arrival 2; give 0"),
        (lambda r: r.mark(3), ReadinessError, "number 3 is out of range"),
        (lambda r: r.hook(3), ReadinessError, "number 3 is out of range"),
        (lambda r: r.flush(), ReadinessError, r"flush\(\) outside a backward pass"),
        (lambda r: r.end(), ReadinessError, r"end\(\) outside a backward pass"),
        (lambda r: r.rebucket([[0, 1]]), PlanError, "'c' stands in no bucket"),
        (lambda r: r.rebucket([[0, 1], [1, 2]]), PlanError, "'b' stands in two buckets"),
        (lambda r: Readiness(["a"], [[0]], [], print, print, print), PlanError, "given 0 eager flags for 1 parameters"),
        (lambda r: (r.begin(), r.begin()), ReadinessError, "is being reduced already; end or abort it"),
        (lambda r: (r.begin(), r.rebucket([[0, 1, 2]])), ReadinessError, "buckets cannot change during a backward"),
        (lambda r: (r.begin(), r.end()), ReadinessError, "2 of 2 buckets not launched"),
    ],
)
def test_errors(act: Callable, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        act(make())


def test_hooks_keep_readiness_alive_and_nothing_else() -> None:
    class Owner:
        def on_bucket(self, bucket: int) -> None: ...

    owner = Owner()
    weak = weakref.WeakMethod(owner.on_bucket)
    hook = make(lambda bucket: weak()(bucket)).hook(0)  # type: ignore[misc]
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None
    hook(object())
