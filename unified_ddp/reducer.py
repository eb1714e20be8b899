"""The reducer: turns gradients that become ready into reductions of buckets, in one order on all ranks.

It knows neither framework. A backend packs gradients into a bucket's storage, starts its reduction and unpacks the
result; the native `Readiness` counts gradients and says which bucket comes next; a `Pass` holds what belongs to one
reduction of all buckets.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Protocol

from unified_ddp._core import Phase, Readiness
from unified_ddp.errors import PlanError, ReductionError
from unified_ddp.passes import Counting, Forward, Pass, PassKind, Reduction
from unified_ddp.plan import BucketPlan
from unified_ddp.ranks.control import Control, Event, Step
from unified_ddp.ranks.progress import Progress
from unified_ddp.ranks.texts import shortened
from unified_ddp.usage import Usage
from unified_ddp.weak import weak_call


class Backend(Protocol):
    """One framework's side of the reducer. Parameters and buckets are indices into the plan."""

    def begin(self, number: int, kind: PassKind, plan: BucketPlan) -> Any:
        """Returns a new pass: a `Pass`, or a subclass of it that holds what this backend keeps of one."""

    def has_gradient(self, current: Any, param: int) -> bool:
        """Says whether this rank has a gradient for the parameter."""

    def count_used(self, used: Sequence[bool]) -> Counting:
        """Starts telling all ranks which parameters this one used."""

    def pack_param(self, current: Any, param: int) -> None:
        """Packs an eager parameter's gradient now: it comes once in this pass, or the pass fails."""

    def pack(self, current: Any, bucket: int) -> None:
        """Packs the gradients of a bucket that are not packed yet."""

    def launch(self, current: Any, bucket: int) -> Reduction:
        """Starts the reduction of a packed bucket, or of zeros if the pass is a shadow."""

    def unpack(self, current: Any, bucket: int, reduced: Any, keep: set[int]) -> None:
        """Makes the reduced storage the gradients of the bucket, save of the positions `keep`."""

    def failure(self, bucket: int, error: RuntimeError) -> Exception:
        """Returns the error to raise for a reduction that failed with `error`: it names parameters and ranks."""

    def end(self, current: Any) -> None:
        """Hears that everything of the pass is reduced, before the used parameters are judged."""

    def frozen(self) -> Iterable[int]:
        """Returns the parameters that ask for no gradient now."""

    def lost(self, current: Any) -> Sequence[str]:
        """Returns, for a pass given up, the parameters whose gradients are neither local nor reduced."""


class Reducer:
    """Reduces the buckets of one plan, one pass after the other.

    Args:
        plan: the buckets.
        backend: packs, launches and unpacks.
        start: called when a gradient arrives while armed; it calls `begin` if this backward pass is to be reduced.
        usage: which parameters take part in an iteration.
        progress: counts passes and names them in errors.
        control: tells the other ranks of a pass before its first collective.
        eager: by parameter, whether `backend.pack_param` is to be called as soon as its gradient is final.
        skip_unused: leave out buckets that no rank used; passes are then begun with `used`.
    """

    def __init__(
        self,
        plan: BucketPlan,
        backend: Backend,
        start: Callable[[], None],
        *,
        usage: Usage,
        progress: Progress,
        control: Control,
        eager: Sequence[bool] | None = None,
        skip_unused: bool = False,
    ) -> None:
        self._adopt(plan)
        self.usage = usage
        self.progress = progress
        self.current: Any = None
        """The pass under way, or the last one."""
        self._control = control
        self._backend = backend
        self._start = start
        self._forwards_passed = 0
        self._skip_unused = skip_unused
        self._in_doubt = False
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
        """Where the current pass stands."""
        return self._readiness.phase

    @property
    def seen_count(self) -> int:
        """Number of parameters that got a gradient in the pass under way, or the last."""
        return self._readiness.seen_count

    def hook(self, param: int) -> Callable[[Any], None]:
        """Returns the native callable to call when the parameter's gradient has been accumulated."""
        return self._readiness.hook(param)

    def mark(self, param: int) -> None:
        """Says that the parameter's gradient has been accumulated; what a hook does."""
        self._readiness.mark(param)

    def seen(self, param: int) -> bool:
        """Says whether the parameter got a gradient in the pass under way, or the last."""
        return self._readiness.seen(param)

    def touched(self, param: int) -> bool:
        """Says whether the parameter got a gradient that is not reduced yet."""
        return self._readiness.touched(param)

    def arm(self, sync: bool = True) -> None:
        """Says whether the next gradient that arrives starts a pass."""
        if sync:
            self._readiness.arm()
        else:
            self._readiness.disarm()

    # --- the entries of a pass

    def begin(
        self,
        kind: PassKind = PassKind.BACKWARD,
        arrival: bytes | None = None,
        used: Sequence[bool] | None = None,
        *,
        origin: Forward | None = None,
        is_certain: bool = True,
    ) -> Any:
        """Starts a pass and returns it.

        Args:
            kind: where its gradients come from.
            arrival: one byte a parameter: 0 it may come, any number of times; 1 it comes exactly once. None means 0
                for all.
            used: which parameters this rank uses, if ranks are to tell each other at once.
            origin: the forward whose outputs the backward pass came through.
            is_certain: this is known to be a pass, and the ranks may be told at once; else when a gradient comes.

        Raises:
            ReadinessError: a pass is under way; `finish` or `give_up` it first. One in which a hook raised stays so
                until then, and reduces nothing more.
            ReductionError: an exception ended earlier passes at different points of the ranks.
        """
        if self.phase is Phase.ACTIVE:
            self._readiness.begin(arrival)  # refuses
        self.agree()
        self.progress.backwards += 1
        self.current = self._backend.begin(self.progress.backwards, kind, self.plan)
        self.current.origin = origin
        if is_certain:
            self._announce()
        if used is not None:
            self._tell(used)
        self._readiness.begin(arrival)
        return self.current

    def passes_too(self, forward: Forward | None) -> None:
        """Hears that the backward pass under way came to the outputs of another forward as well."""
        origin = self.current.origin
        if forward is not None and origin is not None and forward is not origin and forward.number == 0:
            forward.number, forward.passes = origin.number, origin.passes

    def cancel(self) -> None:
        """Takes the pass back: it was none, as nothing came and nothing was launched."""
        self._readiness.abort()
        self.progress.backwards -= 1

    def finish(self) -> None:
        """Launches what is left, waits for everything and unpacks it, in bucket order.

        Raises:
            ReadinessError: no pass was begun, or an error was met in this one before.
            UnusedParameterError: the graph is static, and more was used than in its first iteration.
        """
        if self.phase is not Phase.ACTIVE:
            self._readiness.flush()  # refuses
        current = self.current
        self._in_doubt = True
        try:
            self.settle()
            self._ask_at_end(current)
            current.order = self._readiness.order
            self._readiness.flush()
            if current.used is not None and current.counting is None:
                self._tell(current.used)
            self._collect(current)
            self._close(current)
        except BaseException:
            self._abort()
            raise
        self._in_doubt = False
        counts = current.counts() if self.usage.needs_counts and current.counting is not None else None
        if current.counting is not None:
            current.counting.wait()
        self._backend.end(current)
        if current.kind is not PassKind.ACCUMULATED:
            shadow = current.kind is PassKind.SHADOW
            self.usage.add(current.order, counts, shadow, lambda: (self._backend.frozen(), current.lent))

    def give_up(self) -> None:
        """Gives up a pass that an exception ended. Reductions under way are waited for.

        Raises:
            ReductionError: gradients are lost, half reduced.
        """
        self._in_doubt = True
        self._abort()
        lost = self._backend.lost(self.current)
        if lost:
            raise ReductionError(
                "an exception ended the last backward pass before its reduction did, and the gradients of "
                f"{', '.join(lost)} are neither local nor reduced. Call zero_grad() and run the iteration again"
            )

    def drop(self) -> None:
        """Forgets the pass under way, if there is one: the ranks change, and with them what they owe each other."""
        self._abort()

    def agree(self) -> None:
        """Makes sure that all ranks gave up the same pass at the same point, or none.

        Otherwise the collectives of this rank's next pass would meet those of another rank's last.

        Raises:
            ReductionError: they did not; on every rank.
        """
        if self.is_in_doubt:
            self._in_doubt = False
            self._control.agree(self.progress.backwards, self.current.launched)

    @property
    def is_in_doubt(self) -> bool:
        """Whether an exception may have ended the last pass at another point than on other ranks."""
        return self._in_doubt and self.progress.world_size > 1

    def settle(self) -> None:
        """Waits until all ranks have announced this pass; what is called before any collective of it."""
        current = self.current
        if not current.is_settled:
            current.is_settled = True
            if not current.is_announced:
                self._announce()
            self._control.settle(self.progress.pass_name, self._before_first)

    def rebucket(self, plan: BucketPlan) -> None:
        """Takes another plan over the same parameters, between two passes.

        Raises:
            PlanError: the plan's parameters are others, or registered in another order.
            ReadinessError: a pass is under way.
        """
        if [p.name for p in plan.params] != [p.name for p in self.plan.params]:
            raise PlanError("the new plan is over other parameters; plan the ones that the reducer was made with")
        self._readiness.rebucket([list(b.params) for b in plan.buckets])
        self._adopt(plan)

    def _adopt(self, plan: BucketPlan) -> None:
        self.plan = plan
        names = [plan.params[i].name for i in plan.buckets[0].params] if plan.buckets else []
        self._before_first = f"before the reduction of bucket 0 ({shortened(names)})"
        self._plan_number = plan.fingerprint >> 1

    # --- the parts of a pass

    _EVENTS: ClassVar = {PassKind.BACKWARD: Event.BACKWARD, PassKind.ACCUMULATED: Event.ACCUMULATED}

    def _announce(self) -> None:
        current = self.current
        current.is_announced = True
        if current.kind is PassKind.SHADOW:
            self._forwards_passed += 1  # as on the ranks that it shadows
            return
        forward = current.origin or Forward()
        if current.origin is not None:
            if forward.number == 0:
                self._forwards_passed += 1
                forward.number = self._forwards_passed
            forward.passes += 1
        event = self._EVENTS[current.kind]
        self._control.announce(Step(event, current.number, forward.number, forward.passes, plan=self._plan_number))

    def _tell(self, used: Sequence[bool]) -> None:
        self.settle()
        self.current.used = used
        self.current.counting = self._backend.count_used(used)

    def _ask_at_end(self, current: Pass) -> None:
        if current.used is None and self.usage.is_asked:
            # an undefined gradient reaches a parameter, too, and leaves it without one
            params = range(len(self.plan.params))
            shadow = current.kind is PassKind.SHADOW
            current.used = [not shadow and self.touched(i) and self._backend.has_gradient(current, i) for i in params]

    def _on_start(self) -> None:
        self._start()

    def _on_param(self, param: int) -> None:
        self._backend.pack_param(self.current, param)

    def _on_bucket(self, bucket: int) -> None:
        current = self.current
        self.settle()
        if self._skips(bucket):
            return
        if current.kind is not PassKind.SHADOW:
            current.buckets[bucket].is_packed = True
            self._backend.pack(current, bucket)
        current.launched += 1
        current.in_flight.append((bucket, self._backend.launch(current, bucket)))

    def _skips(self, bucket: int) -> bool:
        # A bucket with a gradient expected here is launched at once; the others wait for the end of the backward
        # pass, when the ranks' answers are in.
        if not self._skip_unused:
            return False
        params, used = self.plan.buckets[bucket].params, self.current.used
        if any(used[i] for i in params):
            return False
        counts = self.current.counts()
        return not any(counts[i] for i in params)

    def _collect(self, current: Pass) -> None:
        while current.in_flight:
            bucket, reduction = current.in_flight.popleft()
            try:
                reduced = reduction.result()
            except RuntimeError as error:
                raise self._backend.failure(bucket, error) from error
            if current.kind is not PassKind.SHADOW:
                self._backend.unpack(current, bucket, reduced, self._unused_everywhere(current, bucket))

    def _unused_everywhere(self, current: Pass, bucket: int) -> set[int]:
        """Returns positions in the bucket; waits for the other ranks only if this one left some parameter unused."""
        params = self.plan.buckets[bucket].params
        if current.used is not None:
            here = [(position, param) for position, param in enumerate(params) if not current.used[param]]
            if not here:
                return set()
            counts = current.counts()
            return {position for position, param in here if counts[param] == 0}
        if (known := self.usage.known) is not None:
            # a static graph; a parameter that has a gradient all the same is not left out
            unused = [(position, param) for position, param in enumerate(params) if known[param] == 0]
            return {position for position, param in unused if not self._backend.has_gradient(current, param)}
        return set()

    def _close(self, current: Pass) -> None:
        if current.kind is PassKind.SHADOW:
            self._readiness.abort()  # what this rank accumulated before stays unreduced
        else:
            self._readiness.end()

    def _abort(self) -> None:
        """Reductions under way are waited for, as other ranks take part in them; results and errors are dropped."""
        self._readiness.abort()
        in_flight = self.current.in_flight if self.current is not None else ()
        while in_flight:
            _, reduction = in_flight.popleft()
            with contextlib.suppress(Exception):
                reduction.result()
