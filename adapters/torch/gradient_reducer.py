"""The reducer of one wrapped module: joins autograd's events, the core's state machine and torch's tensors.

A synchronising backward pass starts with the first gradient of an output of a synchronising forward (or, if a
parameter is reached without passing an output, with its gradient), and ends when autograd ends the outermost backward
pass. In between buckets are launched as they fill.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from unified_ddp.errors import ReductionError
from unified_ddp.plan import BucketPlan, plan_buckets, plan_in_ready_order
from unified_ddp.reducer import Phase, Reducer
from unified_ddp.torch import _engine
from unified_ddp.torch.backend import EAGER_BYTES, TorchBackend
from unified_ddp.torch.hooks import CommHook
from unified_ddp.torch.schema import param_spec
from unified_ddp.torch.transport import ProcessGroupTransport
from unified_ddp.torch.unused import Coverage, require_covered

__all__ = ["GradientReducer", "ReducerOptions"]


@dataclass(frozen=True)
class ReducerOptions:
    """What the constructor of DistributedDataParallel settles for the reducer."""

    initial_caps: tuple[int, ...]
    rebuilt_caps: tuple[int, ...]
    find_unused: bool
    as_views: bool
    static_graph: bool


class GradientReducer:
    """Reduces the gradients of `params` at the end of each synchronising backward pass.

    Args:
        params: by name, in registration order, each with whether its gradient is sparse.
        transport: the ranks.
        options: see there.
    """

    def __init__(
        self,
        params: Mapping[str, tuple[nn.Parameter, bool]],
        transport: ProcessGroupTransport,
        options: ReducerOptions,
    ) -> None:
        self.names = list(params)
        self.params = [p for p, _ in params.values()]
        self.transport = transport
        self.options = options
        self.static_graph = options.static_graph
        self.rebuilt = False
        self._specs = [param_spec(name, p, sparse=sparse) for name, (p, sparse) in params.items()]
        # Registration order, then reversed: the buckets of the first iteration, before any order was observed.
        plan = plan_buckets(self._specs, list(options.initial_caps), reverse=True)
        self.backend = TorchBackend(self.params, transport, options.as_views)
        self.backend.adopt(plan)
        eager = [not s.sparse and s.nbytes >= EAGER_BYTES for s in self._specs]
        self.core = Reducer(plan, self.backend, self._start_at_parameter, eager)
        self._coverage = Coverage(len(self.params))
        self._observed: list[int] | None = None
        self._used_in_static: set[int] | None = None
        self._ends: weakref.ref[_End] | None = None
        self._rearm = False
        # Holding the nodes keeps each on the stream that is current now.
        self._nodes = [_engine.accumulate_grad_node(p) for p in self.params]
        handles = [p.register_post_accumulate_grad_hook(self.core.hook(i)) for i, p in enumerate(self.params)]
        self.remove_hooks = weakref.finalize(self, _remove, handles)

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
            ReductionError: an exception ended its backward pass, and gradients half reduced are still there.
        """
        if self._left_by_exception():
            self._give_up()
        self.require_finished()
        if self.static_graph and self._used_in_static is None and self._coverage.backward_passes:
            self._used_in_static = self._coverage.expected = set(self._coverage.covered)
        self._coverage.next_iteration()

    def require_finished(self) -> None:
        """Raises UnusedParameterError if the iteration so far left an expected parameter without a gradient."""
        if self.options.find_unused and not self.static_graph:
            return
        if self.static_graph and self._used_in_static is None:
            return
        require_covered(self._coverage, self.names, self.transport.rank, static=self.static_graph)

    def prepare_for_backward(self, outputs: Iterable[torch.Tensor]) -> None:
        """Arms: the next backward pass through `outputs` is a synchronising one."""
        self.core.arm()
        self._rearm = False
        _engine.at_backward_start(outputs, _weakly(self._start_at_output))

    def disarm(self) -> None:
        """A forward under no_sync: gradients stay local until the next synchronising backward pass."""
        self.core.arm(False)

    def rebuild_buckets(self) -> bool:
        """Plans the buckets anew in rank 0's observed order, once. Returns whether it did; every rank calls it."""
        if self.rebuilt or self._observed is None or (self.options.find_unused and not self.static_graph):
            return False
        order = self.transport.broadcast_ints(self._observed)
        plan = plan_in_ready_order(self._specs, self.options.rebuilt_caps, order)
        self.core.rebucket(plan)
        self.backend.adopt(plan)
        self.rebuilt = True
        return True

    # --- backward

    def _start_at_output(self, _grad: Any) -> None:
        self._start()

    def _start_at_parameter(self) -> None:
        # Inside a reentrant backward pass the end may come before the outer one has reached every parameter; what
        # comes then is reduced in another go.
        self._rearm = True
        self._start()

    def _start(self) -> None:
        if self.core.phase is Phase.ACTIVE:
            if not self._left_by_exception():
                return
            self._give_up()
        end = _End(self)
        self._ends = weakref.ref(end)
        _engine.at_backward_end(end)
        self.core.begin(self._arrival())

    def _arrival(self) -> bytes | None:
        known = _engine.arrivals(self._nodes)
        if self._used_in_static is None:
            return known
        arrival = bytearray(known or bytes(len(self.params)))
        for i in range(len(arrival)):
            if i not in self._used_in_static:
                arrival[i] = 2
        return bytes(arrival)

    def finish(self) -> None:
        """Ends the synchronising backward pass; autograd calls it."""
        if self.core.phase is not Phase.ACTIVE:
            return
        if not self.core.seen_count and not self.options.find_unused:
            self.core.abort()  # torch.autograd.grad through an output: it leaves every .grad alone
            return
        order = self.core.ready_order
        if self._reports_usage:
            self.backend.report_usage([self.core.touched(i) for i in range(len(self.params))])
        self.core.finish()
        self.backend.finished()
        self.core.arm(self._rearm)
        self._coverage.add(order)
        if self._observed is None:
            seen = set(order)
            self._observed = [*order, *(i for i in reversed(range(len(self.params))) if i not in seen)]

    @property
    def _reports_usage(self) -> bool:
        if self.static_graph:
            return self._used_in_static is None or len(self._used_in_static) < len(self.params)
        return self.options.find_unused

    # --- a backward pass that an exception ended

    def _left_by_exception(self) -> bool:
        """Autograd drops its callbacks, and with them our end, when a backward pass raises."""
        return self.core.phase is Phase.ACTIVE and (self._ends is None or self._ends() is None)

    def _give_up(self) -> None:
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


def _weakly(method: Callable[[Any], None]) -> Callable[[Any], None]:
    """Autograd graphs outlive modules at times, and must not keep them alive."""
    ref = weakref.WeakMethod(method)

    def call(grad: Any) -> None:
        target = ref()
        if target is not None:
            target(grad)

    return call


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
