"""The reducer of one wrapped module: joins autograd's events, the core's passes and torch's tensors.

A synchronising backward pass starts with the first gradient of an output of a synchronising forward (or, if a
parameter is reached without passing an output, with its gradient), and ends when autograd ends the outermost backward
pass. In between buckets are launched as they fill.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from unified_ddp.errors import MisuseError, UnusedParameterError
from unified_ddp.passes import Forward, PassKind
from unified_ddp.plan import BucketPlan, initial_plan, rebuilt_plan
from unified_ddp.ranks.control import Control
from unified_ddp.ranks.progress import Progress
from unified_ddp.reducer import Phase, Reducer
from unified_ddp.torch.options import Options
from unified_ddp.torch.reduction import autograd, distributed_autograd, timing
from unified_ddp.torch.reduction.arrivals import Arrivals
from unified_ddp.torch.reduction.backend import EAGER_BYTES, TorchBackend, TorchPass
from unified_ddp.torch.reduction.comm_hook import CommHook
from unified_ddp.torch.reduction.gradient_check import CheckedBackend
from unified_ddp.torch.reduction.mixed_precision import MixedPrecision
from unified_ddp.torch.reduction.post_reduction import PostReductionHooks
from unified_ddp.torch.reduction.scaling import SCALINGS
from unified_ddp.torch.reduction.storage import LocalGradients
from unified_ddp.torch.reduction.transport import ProcessGroupTransport
from unified_ddp.torch.schema import param_spec
from unified_ddp.usage import Usage
from unified_ddp.weak import weak_call

_live: "weakref.WeakSet[GradientReducer]" = weakref.WeakSet()


class GradientReducer:
    """Reduces the gradients of `params` at the end of each synchronising backward pass.

    Args:
        params: by name, in registration order, each with whether its gradient is sparse.
        transport: the ranks.
        options: the constructor's arguments.
        mixed: lowers and restores the parameters, if mixed precision is asked for.
        post_reduction: hooks to call on parameters whose gradients are reduced.
        progress: names iterations and ranks in errors.
        control: keeps the ranks in step.
    """

    def __init__(
        self,
        params: Mapping[str, tuple[nn.Parameter, bool]],
        transport: ProcessGroupTransport,
        options: Options,
        mixed: MixedPrecision | None,
        post_reduction: PostReductionHooks,
        progress: Progress,
        control: Control,
    ) -> None:
        self.names = list(params)
        self.params = [p for p, _ in params.values()]
        self.transport = transport
        self.options = options
        self.mixed = mixed
        self.post_reduction = post_reduction
        self.progress = progress
        self.control = control
        self.timer = timing.StepTimer(transport.device)
        self.rebuilt = False
        self.on_unreduced: Callable[[], bool] = lambda: True
        """Called for a gradient outside a synchronising backward pass; says whether it needs to hear of no other."""
        self._specs = [param_spec(name, p, sparse=sparse) for name, (p, sparse) in params.items()]
        self._delayed = {i for i, name in enumerate(self.names) if name in options.delayed}
        self._observed: list[int] | None = None
        self._expecting = False
        self._rearm = False
        self._forwards = 0
        self.sync_said: bool | None = None
        """What was said of synchronising since the last forward; None if nothing was."""
        self._post_backward: list[torch.futures.Future] = []
        self.last_pass: TorchPass | None = None
        """The last one that was a backward pass, or a shadow of one, and was reduced."""
        self._make_core(initial_plan(self._specs, options.initial_caps, self._delayed))
        self._arrivals = Arrivals(self.params, self.core.hook, self._delayed, lowered=mixed is not None)
        self._contexts = distributed_autograd.Contexts(self._arrivals.nodes, weak_call(self._node_ran))
        handles = self._arrivals.handles + self.scaling.register()
        self.remove_hooks = weakref.finalize(self, lambda: [handle.remove() for handle in handles])
        self._now = _Now(weak_call(self._start_at_output))
        self.core.arm()
        _live.add(self)

    def _make_core(self, plan: BucketPlan) -> None:
        options, mixed = self.options, self.mixed
        self.usage = Usage(
            self.names,
            self._delayed,
            find_unused=options.find_unused_parameters,
            static=options.static_graph,
            hint=_debug_hint,
        )
        local = LocalGradients() if mixed is None else LocalGradients(mixed.gradient, mixed.scale_gradient)
        self.scaling = SCALINGS[options.reduction](
            self.transport,
            self.progress,
            self.params,
            local,
            touched=lambda param: core.touched(param),
            settle=lambda: core.settle(),
        )
        arguments = (self.params, self.transport, self.scaling, options.gradient_as_bucket_view, mixed, self.progress)
        every, ended = options.check_gradients_every, weak_call(self._ended)
        self.backend = CheckedBackend(every, *arguments, ended) if every else TorchBackend(*arguments, ended)
        self.backend.on_first_launch = functools.partial(self.timer.mark, timing.COMM_START)
        self.backend.on_reduced = functools.partial(self.post_reduction.run, self.names, self.params)
        self.backend.adopt(plan)
        self.core = Reducer(
            plan,
            self.backend,
            weak_call(self._start_at_parameter),
            usage=self.usage,
            progress=self.progress,
            control=self.control,
            eager=[not s.sparse and s.nbytes >= EAGER_BYTES for s in self._specs],
            skip_unused=options.skip_all_reduce_unused_params,
        )
        core = weakref.proxy(self.core)  # without a cycle: a dropped reducer goes at once

    @property
    def plan(self) -> BucketPlan:
        """The buckets, in launch order; rebuilt once in the order in which gradients were seen to become ready."""
        return self.core.plan

    @property
    def comm_hook(self) -> CommHook | None:
        """The registered comm hook."""
        return self.backend.comm_hook

    def register_comm_hook(self, hook: CommHook) -> None:
        """Reduces buckets by `hook` from the next backward pass on.

        Raises:
            RuntimeError: one is registered already, or a backward pass is under way.
        """
        if self.backend.comm_hook is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        if self.core.phase is Phase.ACTIVE:
            raise RuntimeError("a comm hook cannot be registered during a backward pass; register it before")
        self.backend.comm_hook = hook

    # --- forward

    def prepare_for_forward(self) -> None:
        """Starts an iteration: the one before must have ended well.

        Raises:
            UnusedParameterError: it left parameters without a gradient that should have one.
        """
        self.sync_said = None
        try:
            self.usage.next_iteration(self.progress.global_rank)
        except UnusedParameterError as error:
            raise UnusedParameterError(f"{error}{self.progress.unused_elsewhere(error)}") from None
        self.scaling.next_iteration()

    def give_up_what_is_left(self) -> None:
        """Gives up a backward pass that an exception ended.

        Raises:
            ReductionError: gradients are lost, half reduced.
        """
        if self.core.phase is Phase.ACTIVE and self.core.current.is_left:
            self.core.give_up()

    def prepare_for_backward(self, outputs: Iterable[torch.Tensor], sync: bool) -> None:
        """Hears of a forward. If `sync`, the next backward pass through `outputs` is reduced, else it stays local."""
        self.sync_said = None
        now, forward = self._now, Forward(sync)
        autograd.at_backward_start(outputs, lambda _grad: now.start(forward))
        if sync:
            self._arm()
            return
        self.core.arm(False)
        if self.mixed is not None:
            mixed = self.mixed
            autograd.at_backward_start(outputs, lambda _grad: autograd.at_backward_end(mixed.restore))

    def say_sync(self, sync: bool) -> None:
        """Says of the forwards whose backward passes are to come whether these are reduced, whatever it was before."""
        self.sync_said = sync

    def _arm(self) -> None:
        self._contexts.enter()
        self.core.arm()
        self._forwards += 1
        self._expecting = True
        self._rearm = False

    @property
    def has_order_to_rebuild(self) -> bool:
        """Whether `rebuild_buckets` would plan anew."""
        return not (self.rebuilt or self._observed is None or self.usage.varies)

    def rebuild_buckets(self) -> bool:
        """Plans the buckets anew in rank 0's observed order, once. Returns whether it did; every rank calls it."""
        if not self.has_order_to_rebuild:
            return False
        assert self._observed is not None
        with self.progress.waiting(self.progress.forward_name, "rank 0's order of buckets"):
            order = self.transport.broadcast_ints(self._observed)
        plan = rebuilt_plan(self._specs, self.options.rebuilt_caps, order, self._delayed)
        self.core.rebucket(plan)
        self.backend.adopt(plan)
        self.rebuilt = True
        return True

    # --- backward

    def _start_at_output(self, forward: Forward) -> None:
        self.give_up_what_is_left()
        sync = forward.is_sync if self.sync_said is None else self.sync_said
        if sync and not forward.is_sync:
            self._arm()
        if sync:
            self._start(forward)
        elif forward.is_sync:
            self.core.arm(False)
        elif self.core.phase is Phase.ARMED:
            # Its gradients stay local, although a synchronising forward has come since and waits for its own pass.
            self.core.arm(False)
            autograd.at_backward_end(weak_call(self.core.arm))

    def _start_at_parameter(self) -> None:
        if not self._expecting:
            self._arrived_unreduced()
            return
        # Inside a reentrant backward pass the end may come before the outer one has reached every parameter; what
        # comes then is reduced in another go.
        self._rearm = True
        self._start(None)

    def _arrived_unreduced(self) -> None:
        mine = set(self.params)
        # another wrapper of the same module may be the one that reduces them
        shared = any(not mine.isdisjoint(other.params) for other in _live if other is not self)
        if shared or self.on_unreduced():
            self.core.arm(False)

    def _start(self, forward: Forward | None) -> None:
        if self.core.phase is Phase.ACTIVE:
            self.core.passes_too(forward)
            return
        arrival = self._expected()
        reaches_any = arrival is not None and any(arrival)
        skip_unused = self.options.skip_all_reduce_unused_params
        # Where all ranks take part in a pass that reaches no parameter here, autograd.grad must be told from it now.
        asks = self.options.find_unused_parameters or skip_unused
        if asks and arrival is not None and not reaches_any and autograd.is_autograd_grad():
            return
        self.timer.mark(timing.BACKWARD_START)
        end = _End(self)
        autograd.at_backward_end(end)
        used = None
        if skip_unused:
            used = [bool(a) or self.core.touched(i) for i, a in enumerate(arrival or bytes([1]) * len(self.params))]
        current = self.core.begin(
            arrival=self._arrivals.counted_on(arrival), used=used, origin=forward, is_certain=reaches_any
        )
        current.end = weakref.ref(end, weak_call(self._end_dropped))
        if reaches_any:
            current.share.exchange()

    def _end_dropped(self, _end: Any) -> None:
        """Autograd let go of our end: it was called, or an exception has ended the backward pass."""
        if self.core.phase is Phase.ACTIVE and self.core.current.is_left:
            self.progress.raised(RuntimeError("an exception ended the backward pass"))

    def _expected(self) -> bytes | None:
        if not self.usage.varies:
            return self._arrivals.expected(self._forwards)
        with torch.autograd.profiler.record_function("unified_ddp::search_unused_parameters"):
            return self._arrivals.expected(self._forwards)

    def errors_noted(self) -> AbstractContextManager[None]:
        """Encloses what may raise; for subclasses that keep errors."""
        return nullcontext()

    def _node_ran(self, param: int, context: int | None) -> None:
        """Under distributed autograd, where hooks on parameters do not run."""
        # in an ordinary backward pass the parameter's own hook has been here before
        if not (self.core.phase is Phase.ACTIVE and self.core.seen(param)) and self.core.phase is not Phase.IDLE:
            self.core.mark(param)
            if self.core.phase is Phase.ACTIVE:
                self.core.current.context_id = context

    def finish(self) -> None:
        """Ends the synchronising backward pass; autograd calls it."""
        if self.core.phase is not Phase.ACTIVE:
            return
        self.timer.mark(timing.BACKWARD_END)
        current = self.core.current
        if not self.core.seen_count and not self.options.find_unused_parameters:
            self.core.cancel()  # torch.autograd.grad through an output: it leaves every .grad alone
            return
        if current.context_id is not None:
            current.context = distributed_autograd.context_gradients(current.context_id)
        with self.errors_noted():
            self._finish()

    def _finish(self) -> None:
        try:
            self.core.finish()
        finally:
            self.post_reduction.raise_first()

    def _ended(self, current: TorchPass) -> None:
        self.timer.mark(timing.COMM_END)
        for future in self._post_backward:
            future.wait()
        self._post_backward = []
        if current.kind is PassKind.ACCUMULATED:
            return
        self.last_pass = current
        self._forwards = 0
        if current.order:
            self._expecting = self._rearm
        # As torch's class, which observes a static graph from the second iteration on: the same buckets, the same bits.
        if self._observed is None and (self.usage.iterations or not self.usage.static):
            seen = set(current.order)
            self._observed = [*current.order, *(i for i in reversed(range(len(self.params))) if i not in seen)]

    def shadow_backward(self) -> None:
        """Takes part in the ranks' reductions with zeros: this rank has no more inputs (see `join`)."""
        used = [False] * len(self.params) if self.options.skip_all_reduce_unused_params else None
        current = self.core.begin(PassKind.SHADOW, used=used)
        current.share.factor()  # raises on every rank or on none
        self._finish()

    def reduce_accumulated(self) -> None:
        """Reduces every gradient as it is, outside a backward pass. What no rank has is left alone.

        Raises:
            MisuseError: a backward pass is under way.
            ReductionError: one ended with gradients half reduced.
        """
        if autograd.in_backward():
            raise MisuseError("sync_gradients() was called during a backward pass; call it when that has ended")
        if self.core.phase is Phase.ACTIVE:
            self.core.give_up()
        if self.mixed is not None:
            self.mixed.restore()
        used = [self.backend.has_gradient(None, i) for i in range(len(self.params))]
        self.core.begin(PassKind.ACCUMULATED, used=used)
        self._finish()

    def take_over(self, other: "GradientReducer") -> None:
        """Goes on where another reducer of the same module, before it was changed, has stopped."""
        self._now = other._now
        self._now.start = weak_call(self._start_at_output)
        before = {param: i for i, param in enumerate(other.params)}
        self.core.arm(False)
        for i, param in enumerate(self.params):
            if param not in before or other.core.touched(before[param]):
                self.core.mark(i)
        self.core.arm()
        self.scaling.take_over(other.scaling, {before[p]: i for i, p in enumerate(self.params) if p in before})


class _Now:
    """What autograd graphs hold of a wrapper: the entry to its reducer, which another takes over when it changes."""

    def __init__(self, start: Callable[[Forward], None]) -> None:
        self.start = start


class _End:
    """The callback that autograd holds during a synchronising backward pass, and nobody else."""

    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = reducer

    def __call__(self) -> None:
        self._reducer.finish()


def _debug_hint() -> str:
    if dist.get_debug_level() != dist.DebugLevel.OFF:
        return ""
    return (
        "\nIn addition, you can set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL to see "
        "more of what the ranks do."
    )
