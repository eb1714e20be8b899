"""The reducer of one wrapped module: joins autograd's events, the core's state machine and torch's tensors.

A synchronising backward pass starts with the first gradient of an output of a synchronising forward (or, if a
parameter is reached without passing an output, with its gradient), and ends when autograd ends the outermost backward
pass. In between buckets are launched as they fill.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from unified_ddp.errors import ReductionError, UnusedParameterError
from unified_ddp.plan import BucketPlan
from unified_ddp.ranks.progress import Progress
from unified_ddp.reducer import Phase, Reducer
from unified_ddp.torch.parity.reducer_members import ReducerMembers
from unified_ddp.torch.planning import initial_plan, rebuilt_plan
from unified_ddp.torch.reduction import autograd, distributed_autograd, timing
from unified_ddp.torch.reduction.backend import EAGER_BYTES, TorchBackend
from unified_ddp.torch.reduction.comm_hook import CommHook
from unified_ddp.torch.reduction.mixed_precision import MixedPrecision
from unified_ddp.torch.reduction.post_reduction import PostReductionHooks
from unified_ddp.torch.reduction.scaling import SumScaling, make_scaling
from unified_ddp.torch.reduction.transport import ProcessGroupTransport
from unified_ddp.torch.schema import param_spec
from unified_ddp.usage import Usage
from unified_ddp.weak import weak_call

__all__ = ["GradientReducer", "ReducerOptions"]


@dataclass(frozen=True)
class ReducerOptions:
    """What the constructor of DistributedDataParallel settles for the reducer."""

    initial_caps: tuple[int, ...]
    rebuilt_caps: tuple[int, ...]
    bucket_cap_bytes: int
    find_unused: bool
    as_views: bool
    static_graph: bool
    skip_unused: bool = False
    delayed: frozenset[str] = frozenset()
    reduction: str = "mean"


_live: "weakref.WeakSet[GradientReducer]" = weakref.WeakSet()


class GradientReducer(ReducerMembers):
    """Reduces the gradients of `params` at the end of each synchronising backward pass.

    Args:
        params: by name, in registration order, each with whether its gradient is sparse.
        transport: the ranks.
        options: see there.
        mixed: lowers and restores the parameters, if mixed precision is asked for.
        post_reduction: hooks to call on parameters whose gradients are reduced.
        progress: names iterations and ranks in errors.
    """

    def __init__(
        self,
        params: Mapping[str, tuple[nn.Parameter, bool]],
        transport: ProcessGroupTransport,
        options: ReducerOptions,
        mixed: MixedPrecision | None = None,
        post_reduction: PostReductionHooks | None = None,
        *,
        progress: Progress,
    ) -> None:
        self.names = list(params)
        self.progress = progress
        self.params = [p for p, _ in params.values()]
        self.transport = transport
        self.options = options
        self.mixed = mixed
        self.rebuilt = False
        self.timer = timing.StepTimer(transport.device)
        self._specs = [param_spec(name, p, sparse=sparse) for name, (p, sparse) in params.items()]
        self._delayed = {i for i, name in enumerate(self.names) if name in options.delayed}
        self._several_devices = len({p.device for p in self.params}) > 1
        self.usage = Usage(
            self.names, self._delayed, find_unused=options.find_unused, static=options.static_graph, hint=_debug_hint
        )
        plan = initial_plan(self._specs, options.initial_caps, self._delayed)
        self.backend = TorchBackend(
            self.params,
            transport,
            options.as_views,
            options.skip_unused,
            mixed,
            progress=progress,
        )
        self.backend.on_first_launch = functools.partial(self.timer.mark, timing.COMM_START)
        self.backend.adopt(plan)
        self.post_reduction = post_reduction or PostReductionHooks()
        self.backend.on_reduced = functools.partial(self.post_reduction.run, self.names, self.params)
        eager = [not s.sparse and s.nbytes >= EAGER_BYTES for s in self._specs]
        self.core = Reducer(plan, self.backend, weak_call(self._start_at_parameter), eager)
        # without a cycle: a dropped reducer goes at once
        touched = functools.partial(Reducer.touched, weakref.proxy(self.core))
        self.scaling = self.backend.scaling = make_scaling(options.reduction, transport, touched)
        self.last_order: tuple[int, ...] = ()
        self.buckets_reduced = 0
        self._observed: list[int] | None = None
        self._ends: weakref.ref[_End] | None = None
        self._expecting = False
        self._in_doubt = False
        self.on_unreduced: Callable[[], bool] = lambda: True
        """Called for a gradient outside a synchronising backward pass; says whether it needs to hear of no other."""
        self.core.arm()
        self._node_handles: list[Any] = []
        self._forwards = 0
        self._forward_context: int | None = None
        self._context: int | None = None
        self._rearm = False
        self._post_backward: list[torch.futures.Future] = []
        # Holding the nodes keeps each on the stream that is current now.
        self._nodes = [autograd.accumulate_grad_node(p) for p in self.params]
        handles = [p.register_post_accumulate_grad_hook(self.core.hook(i)) for i, p in enumerate(self.params)]
        self._hook_ids = [handle.id for handle in handles]
        if isinstance(self.scaling, SumScaling):
            before = weak_call(self._before_gradient)
            handles += [p.register_hook(_at(before, i)) for i, p in enumerate(self.params)]
        self.remove_hooks = weakref.finalize(self, _remove, handles)
        _live.add(self)

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
            ReductionError: an exception ended its backward pass, and gradients half reduced are still there, or it
                ended so on other ranks only.
        """
        if self._left_by_exception():
            self._give_up()
        self._agree_after_exception()
        try:
            self.usage.next_iteration(self.transport.rank)
        except UnusedParameterError as error:
            raise UnusedParameterError(f"{error}{self._other_ranks(error)}") from None
        if self.scaling is not None:
            self.scaling.next_iteration()

    def _other_ranks(self, error: UnusedParameterError) -> str:
        """Tells the other ranks what this one left unused, and returns what they say of themselves."""
        phase = f"the check of used parameters in {self.progress.forward_name}"
        self.progress.leave_sign(phase, "before anything was exchanged", error)
        lines = []
        for rank, sign in self.progress.other_signs().items():
            if sign is not None and sign.phase == phase:
                lines += [line for line in sign.error.splitlines() if f"grad for rank {rank}: " in line][-1:]
            else:
                lines.append(
                    f"Rank {rank} raised no such error: it had a gradient for every parameter, or is elsewhere"
                )
        return "".join(f"\n{line}" for line in lines)

    def prepare_for_backward(self, outputs: Iterable[torch.Tensor]) -> None:
        """Arms: the next backward pass through `outputs` is a synchronising one."""
        if distributed_autograd.is_in_use():
            self._forward_context = distributed_autograd.current_context()
            if not self._node_handles:
                self._node_handles = distributed_autograd.hook_nodes(self._nodes, weak_call(self._node_ran))
                weakref.finalize(self, _remove, self._node_handles)
        self.core.arm()
        self._forwards += 1
        self._expecting = True
        self._rearm = False
        autograd.at_backward_start(outputs, weak_call(self._start_at_output))

    def disarm(self, outputs: Iterable[torch.Tensor]) -> None:
        """A forward under no_sync: gradients stay local until the next synchronising backward pass."""
        self.core.arm(False)
        if self.mixed is not None:
            mixed = self.mixed
            autograd.at_backward_start(outputs, lambda _grad: autograd.at_backward_end(mixed.restore))

    def rebuild_buckets(self) -> bool:
        """Plans the buckets anew in rank 0's observed order, once. Returns whether it did; every rank calls it."""
        if self.rebuilt or self._observed is None or self.usage.varies or autograd.in_functorch():
            return False
        with self.progress.waiting(self.progress.forward_name, "rank 0's order of buckets"):
            order = self.transport.broadcast_ints(self._observed)
        plan = rebuilt_plan(self._specs, self.options.rebuilt_caps, order, self._delayed)
        self.core.rebucket(plan)
        self.backend.adopt(plan)
        self.rebuilt = True
        return True

    # --- backward

    def _start_at_output(self, _grad: Any) -> None:
        self._start()

    def _start_at_parameter(self) -> None:
        if not self._expecting:
            self._arrived_unreduced()
            return
        # Inside a reentrant backward pass the end may come before the outer one has reached every parameter; what
        # comes then is reduced in another go.
        self._rearm = True
        self._start()

    def _arrived_unreduced(self) -> None:
        mine = set(self.params)
        # another wrapper of the same module may be the one that reduces them
        shared = any(not mine.isdisjoint(other.params) for other in _live if other is not self)
        if shared or self.on_unreduced():
            self.core.arm(False)

    def _node_ran(self, param: int) -> None:
        # in an ordinary backward pass the parameter's own hook has been here before
        if not (self.core.phase is Phase.ACTIVE and self.core.seen(param)) and self.core.phase is not Phase.IDLE:
            self._context = self._forward_context
            self.core.mark(param)

    def _before_gradient(self, param: int) -> None:
        """Before a parameter's gradient is added to its `.grad`: see `SumScaling`."""
        assert isinstance(self.scaling, SumScaling)
        if self.core.touched(param) or param in self.scaling.shared or not self.backend.has_gradient(param):
            return
        if autograd.accumulates(autograd.accumulate_grad_node(self.params[param])):
            self.backend.scale_gradient(param, self.scaling.share)
            self.scaling.shared.add(param)

    def _start(self) -> None:
        if self.core.phase is Phase.ACTIVE:
            if not self._left_by_exception():
                return
            self._give_up()
        arrival = self._arrivals()
        if arrival is not None and not any(arrival) and self._asks_at_once and autograd.is_autograd_grad():
            return
        self._agree_after_exception()
        self.timer.mark(timing.BACKWARD_START)
        self.progress.backwards += 1
        end = _End(self)
        self._ends = weakref.ref(end)
        autograd.at_backward_end(end)
        self.backend.start_step()
        if self.options.skip_unused:
            expected = arrival if arrival is not None else bytes([1]) * len(self.params)
            self.backend.ask_usage([bool(a) or self.core.touched(i) for i, a in enumerate(expected)])
        if self.scaling is not None and arrival is not None and any(arrival):  # not if this is autograd.grad
            self.scaling.exchange()
        # With several devices, a bucket may become ready on the engine's thread for another one, whose streams are not
        # those that its gradients were made on; at the end of the pass the caller's streams have waited for all.
        self.core.begin(None if self._several_devices else self._without_delayed(arrival))

    @property
    def _asks_at_once(self) -> bool:
        """Whether a backward pass that reaches no parameter takes part in the ranks' reduction all the same."""
        return self.options.find_unused or self.options.skip_unused

    def _arrivals(self) -> bytes | None:
        if self.mixed is not None:
            if self._forwards > 1:  # each lowered the parameters anew, and reaches them through nodes of its own
                return None
            arrival = autograd.arrivals([autograd.accumulate_grad_node(p) for p in self.params])
        elif not self.usage.varies:
            arrival = autograd.arrivals(self._nodes)
        else:
            with torch.autograd.profiler.record_function("unified_ddp::search_unused_parameters"):
                arrival = autograd.arrivals(self._nodes)
        return arrival if arrival is None else self._without_later_hooks(arrival)

    def _without_later_hooks(self, arrival: bytes) -> bytes:
        """A parameter whose gradient other hooks change after ours has its final one only when the pass ends."""
        every = [p._post_accumulate_grad_hooks for p in self.params]
        later = {i for i, hooks in enumerate(every) if len(hooks) > 1 and next(reversed(hooks)) != self._hook_ids[i]}
        return bytes(0 if i in later else a for i, a in enumerate(arrival)) if later else arrival

    def _without_delayed(self, arrival: bytes | None) -> bytes | None:
        if not self._delayed or arrival is None:
            return arrival
        return bytes(0 if i in self._delayed else a for i, a in enumerate(arrival))

    def finish(self) -> None:
        """Ends the synchronising backward pass; autograd calls it."""
        if self.core.phase is Phase.ACTIVE:
            with self.errors_logged():
                self._finish()

    def _finish(self) -> None:
        self.timer.mark(timing.BACKWARD_END)
        if not self.core.seen_count and not self.options.find_unused:
            self.core.abort()  # torch.autograd.grad through an output: it leaves every .grad alone
            self.progress.backwards -= 1
            return
        self.last_order = self.core.ready_order
        if self._context is not None:
            self.backend.enter_context(distributed_autograd.context_gradients(self._context))
            self._context = None
        if self.usage.is_asked and not self.options.skip_unused:
            # an undefined gradient reaches a parameter, too, and leaves it without one
            used = [self.core.touched(i) and self.backend.has_gradient(i) for i in range(len(self.params))]
            self.backend.report_usage(used)
        self.backend.known_usage = self.usage.known
        self._in_doubt = True
        try:
            self.core.finish()
            self._in_doubt = False
            self._after_reduction()
        finally:
            self.post_reduction.raise_first()

    def _after_reduction(self, shadow: bool = False) -> None:
        self.timer.mark(timing.COMM_END)
        if self.mixed is not None:
            self.mixed.restore()
        for future in self._post_backward:
            future.wait()
        self._post_backward = []
        self.buckets_reduced = self.backend.launched
        counts = self.backend.finished(self.usage.needs_counts)
        self._forwards = 0
        if self.scaling is not None:
            self.scaling.end()
        if self.core.seen_count:
            self._expecting = self._rearm
        # As torch's class, which observes a static graph from the second iteration on: the same buckets, the same bits.
        if self._observed is None and (self.usage.iterations or not self.usage.static):
            seen = set(self.last_order)
            self._observed = [*self.last_order, *(i for i in reversed(range(len(self.params))) if i not in seen)]
        self.usage.add(self.last_order, counts, shadow, self._incomplete)

    def take_over(self, other: "GradientReducer") -> None:
        """Goes on where another reducer of the same module, before it was changed, has stopped."""
        before = {param: i for i, param in enumerate(other.params)}
        self.core.arm(False)
        for i, param in enumerate(self.params):
            if param not in before or other.core.touched(before[param]):
                self.core.mark(i)
        self.core.arm()
        if self.scaling is not None and other.scaling is not None:
            self.scaling.take_over(other.scaling, {before[p]: i for i, p in enumerate(self.params) if p in before})

    def _incomplete(self) -> tuple[list[int], list[int]]:
        return [i for i, p in enumerate(self.params) if not p.requires_grad], self.backend.lent

    def shadow_backward(self) -> None:
        """Takes part in the ranks' reductions with zeros: this rank has no more inputs (see `join`)."""
        self.progress.backwards += 1
        self.backend.start_step()
        self.last_order = ()
        nobody = [False] * len(self.params)
        if self.options.skip_unused:
            self.backend.ask_usage(nobody)
        if self.scaling is not None:
            self.scaling.exchange(joined=True)
            self.scaling.factor()  # raises on every rank or on none
        pending = [self.backend.launch_zeros(bucket) for bucket in range(len(self.plan.buckets))]
        if self.usage.is_asked and not self.options.skip_unused:
            self.backend.report_usage(nobody)
        self.backend.all_launched()
        for bucket, reduction in enumerate(pending):
            self.core.wait(bucket, reduction)
        self._after_reduction(shadow=True)

    def reduce_accumulated(self) -> None:
        """Reduces every gradient as it is, outside a backward pass. What no rank has is left alone.

        Raises:
            ReductionError: a backward pass is under way, or one ended with gradients half reduced.
        """
        if autograd.in_backward():
            raise ReductionError("sync_gradients() was called during a backward pass; call it when that has ended")
        if self.core.phase is Phase.ACTIVE:
            self._give_up()
        self._agree_after_exception()
        if self.mixed is not None:
            self.mixed.restore()
        self.progress.backwards += 1
        self.backend.start_step()
        self.backend.ask_usage([self.backend.has_gradient(i) for i in range(len(self.params))])
        self.core.begin()
        self._in_doubt = True
        try:
            self.core.finish()
            self._in_doubt = False
            self.backend.finished()
            if self.scaling is not None:
                self.scaling.end()
        finally:
            self.post_reduction.raise_first()

    # --- a backward pass that an exception ended

    def _left_by_exception(self) -> bool:
        """Autograd drops its callbacks, and with them our end, when a backward pass raises."""
        return self.core.phase is Phase.ACTIVE and (self._ends is None or self._ends() is None)

    def _agree_after_exception(self) -> None:
        """Makes sure that all ranks gave up the same backward pass at the same point, or none.

        Otherwise the collectives of this rank's next pass would meet those of another rank's last.
        """
        if not self._in_doubt or self.transport.world_size == 1:
            return
        self._in_doubt = False
        mine = self.progress.backwards << 32 | self.backend.launched
        phase = "the agreement of ranks after an exception in a backward pass"
        with self.progress.waiting(phase, f"given up: {self.progress.pass_name}"):
            every = self.transport.all_gather_ints(mine)
        if len(set(every)) > 1:
            points = [f"rank {r}: pass {e >> 32} after {e & 0xFFFFFFFF} buckets" for r, e in enumerate(every)]
            raise ReductionError(
                "an exception ended synchronising backward passes at different points of the ranks, so that their "
                f"gradients no longer match: {'; '.join(points)}. Start again from a checkpoint"
            )

    def _give_up(self) -> None:
        self._in_doubt = True
        launched = self.core.launched
        self.core.abort()
        self.backend.finished()
        if not self.options.as_views:
            return  # .grad is untouched local gradient, which the next reduction takes in
        held = [i for b in self.plan.buckets[:launched] for i in b.params if self.params[i].grad is not None]
        lost = [self.names[i] for i in held if torch.count_nonzero(self.params[i].grad)]  # type: ignore[arg-type]
        if lost:
            raise ReductionError(
                "an exception ended the last backward pass before its reduction did, and the gradients of "
                f"{', '.join(lost)} are neither local nor reduced. Call zero_grad() and run the iteration again"
            )


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


def _at(call: Callable[[int], None], param: int) -> Callable[[Any], None]:
    return lambda _grad: call(param)


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
