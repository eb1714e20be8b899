"""The reducer: turns gradients that become ready into reductions of buckets, in one order on all ranks.

It knows neither framework. A backend packs gradients into a bucket's storage, starts its reduction and unpacks the
result; the native `Readiness` counts gradients and says which bucket comes next.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from unified_ddp._core import Phase, Readiness
from unified_ddp.errors import PlanError
from unified_ddp.plan import BucketPlan
from unified_ddp.weak import weak_call

__all__ = ["Backend", "Phase", "Reducer", "Reduction"]


class Reduction(Protocol):
    """The reduction of one bucket under way."""

    def result(self) -> Any:
        """Waits (on GPUs: in stream order) and returns the reduced storage."""


class Backend(Protocol):
    """One framework's side of the reducer. Parameters and buckets are indices into the plan."""

    def pack_param(self, param: int) -> None:
        """Packs an eager parameter's gradient now: it comes once in this backward pass, or the pass fails."""

    def launch(self, bucket: int) -> Reduction:
        """Packs what is not packed yet and starts the bucket's reduction."""

    def all_launched(self) -> None:
        """Hears that every bucket is launched, before the first result is waited for."""

    def unpack(self, bucket: int, reduced: Any) -> None:
        """Makes the reduced storage the parameters' gradients."""

    def failure(self, bucket: int, error: RuntimeError) -> Exception:
        """Returns the error to raise for a reduction that failed with `error`: it names parameters and ranks."""


class Reducer:
    """Reduces the buckets of one plan, one synchronising backward pass after the other.

    Args:
        plan: the buckets.
        backend: packs, launches and unpacks.
        start: called when a gradient arrives while armed; it calls `begin` if this backward pass is to be reduced.
        eager: by parameter, whether `backend.pack_param` is to be called as soon as its gradient is final.
    """

    def __init__(
        self, plan: BucketPlan, backend: Backend, start: Callable[[], None], eager: Sequence[bool] | None = None
    ) -> None:
        self.plan = plan
        self._backend = backend
        self._start = start
        self._in_flight: deque[Reduction] = deque()
        self._readiness = Readiness(
            [p.name for p in plan.params],
            [list(b.params) for b in plan.buckets],
            list(eager) if eager is not None else [False] * len(plan.params),
            weak_call(self._on_start),
            weak_call(self._on_bucket),
            weak_call(self._on_param),
        )

    @property
    def phase(self) -> Phase:
        """Where the current backward pass stands."""
        return self._readiness.phase

    @property
    def ready_order(self) -> tuple[int, ...]:
        """Parameters in the order in which gradients came in the current or last synchronising backward pass."""
        return self._readiness.order

    @property
    def launched(self) -> int:
        """Number of buckets launched in the current or last synchronising backward pass."""
        return self._readiness.launched

    def hook(self, param: int) -> Callable[[Any], None]:
        """Returns the native callable to call when the parameter's gradient has been accumulated."""
        return self._readiness.hook(param)

    def mark(self, param: int) -> None:
        """Says that the parameter's gradient has been accumulated; what a hook does."""
        self._readiness.mark(param)

    @property
    def seen_count(self) -> int:
        """Number of parameters that got a gradient in the current or last synchronising backward pass."""
        return self._readiness.seen_count

    def seen(self, param: int) -> bool:
        """Says whether the parameter got a gradient in the current or last synchronising backward pass."""
        return self._readiness.seen(param)

    def touched(self, param: int) -> bool:
        """Says whether the parameter got a gradient that is not reduced yet."""
        return self._readiness.touched(param)

    def arm(self, sync: bool = True) -> None:
        """Says whether the next gradient that arrives starts a synchronising backward pass."""
        if sync:
            self._readiness.arm()
        else:
            self._readiness.disarm()

    def begin(self, arrival: bytes | None = None) -> None:
        """Starts a synchronising backward pass.

        Args:
            arrival: one byte a parameter: 0 it may come, any number of times; 1 it comes exactly once; 2 it does not
                come. None means 0 for all.

        Raises:
            ReadinessError: a backward pass is under way; `finish` or `abort` it first. One in which a hook raised
                stays so until then, and reduces nothing more.
        """
        self._readiness.begin(arrival)

    def finish(self) -> None:
        """Launches what is left, waits for everything and unpacks it, in bucket order.

        Raises:
            ReadinessError: no backward pass was begun, or an error was met in this one before.
        """
        try:
            self._readiness.flush()
            self._backend.all_launched()
            for bucket in range(len(self._in_flight)):
                self._backend.unpack(bucket, self.wait(bucket, self._in_flight.popleft()))
            self._readiness.end()
        except BaseException:
            self.abort()
            raise

    def wait(self, bucket: int, reduction: Reduction) -> Any:
        """Waits for a bucket's reduction and returns the reduced storage; a failure is named by the backend."""
        try:
            return reduction.result()
        except RuntimeError as error:
            raise self._backend.failure(bucket, error) from error

    def abort(self) -> None:
        """Gives the current backward pass up. Reductions under way are waited for, their results and errors dropped."""
        in_flight, self._in_flight = self._in_flight, deque()
        self._readiness.abort()
        for reduction in in_flight:
            with contextlib.suppress(Exception):
                reduction.result()

    def rebucket(self, plan: BucketPlan) -> None:
        """Takes another plan over the same parameters, between two backward passes.

        Raises:
            PlanError: the plan's parameters are others, or registered in another order.
            ReadinessError: a backward pass is under way.
        """
        if [p.name for p in plan.params] != [p.name for p in self.plan.params]:
            raise PlanError("the new plan is over other parameters; plan the ones that the reducer was made with")
        self._readiness.rebucket([list(b.params) for b in plan.buckets])
        self.plan = plan

    def _on_start(self) -> None:
        self._start()

    def _on_bucket(self, bucket: int) -> None:
        self._in_flight.append(self._backend.launch(bucket))

    def _on_param(self, param: int) -> None:
        self._backend.pack_param(param)
