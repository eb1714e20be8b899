"""The wrapped module: compared and sent at construction, given a reducer, and followed when it changes."""

import copy
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.distributed.distributed_c10d import _get_default_group
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from unified_ddp.errors import MisuseError
from unified_ddp.hooks.describe import describe
from unified_ddp.plan import BucketPlan
from unified_ddp.ranks.construction import check_construction
from unified_ddp.ranks.control import Control, Does, Event, Step
from unified_ddp.ranks.last_words import follow
from unified_ddp.ranks.progress import Progress
from unified_ddp.torch import options as opts
from unified_ddp.torch.comm_hooks.torchs import must_run_alone, working_hook
from unified_ddp.torch.module.broadcast import broadcast_module
from unified_ddp.torch.module.replicas import are_equal, check_replicas
from unified_ddp.torch.module.watch import ModuleWatch, names_to_ignore
from unified_ddp.torch.reduction.comm_hook import CommHook, check_comm_hook
from unified_ddp.torch.reduction.control_plane import plane_of
from unified_ddp.torch.reduction.gradient_reducer import GradientReducer
from unified_ddp.torch.reduction.mixed_precision import MixedPrecision
from unified_ddp.torch.reduction.post_reduction import PostReductionHooks
from unified_ddp.torch.reduction.transport import ProcessGroupTransport
from unified_ddp.torch.schema import compared_specs, reduced_parameters
from unified_ddp.weak import weak_call

_CONSTRUCTION = "construction of DistributedDataParallel"


class WrappedModule(TorchDDP):
    """A module whose gradients the ranks of a process group reduce.

    A subclass of torch's class for identity only: its constructor is never called, its reducer never made. The
    attributes without an underscore are those that the methods inherited from it use.

    Args:
        module: the module; its parameters' values are taken from rank 0.
        process_group: the ranks.
        options: all else that is known of the reduction.
        device_ids: the one accelerator of a single-device module, or None.
        output_device: where the outputs are.
        dim: along which `scatter` and `gather` cut.
    """

    # What pickling leaves out, and unpickling makes anew.
    _left_behind: tuple[str, ...] = (
        "process_group",
        "reducer",
        "_mixed",
        "_transport",
        "_progress",
        "_control",
        "_watch",
    )

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup,
        options: opts.Options,
        device_ids: Sequence[int | torch.device] | None,
        output_device: int | torch.device | None,
        dim: int,
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        self.process_group = process_group
        self.parameters_to_ignore = names_to_ignore(module)
        self._take_parameters(module)
        placement = opts.Placement.of(self._module_parameters, device_ids, output_device)
        self.is_multi_device_module = placement.multi_device
        self.device_type, self.device = placement.device.type, placement.device
        self.device_ids, self.output_device = placement.device_ids, placement.output_device
        self.dim = dim
        self.module = module
        self.options = options
        self.forward_sync_buffers = options.forward_sync_buffers
        self._grad_sync = True
        self.require_forward_param_sync = True
        self.use_side_stream_for_tensor_copies = opts.use_side_stream()
        self.broadcast_bucket_size = 250 * 1024 * 1024
        self._divide_by_initial_world_size = True
        self._comm_hooks: list[tuple[Callable[..., Any], object]] = []
        self._post_reduction = PostReductionHooks()
        self._has_rebuilt_buckets = False
        self._assign_modules_buffers()
        self._join_group()
        if options.init_sync:
            self._compare_construction()
            self._broadcast_state()
        self._make_reducer()

    def _take_parameters(self, module: nn.Module) -> None:
        self._module_parameters = [p for n, p in module.named_parameters() if n not in self.parameters_to_ignore]
        opts.check_parameters(self._module_parameters)

    def _join_group(self) -> None:
        self._transport = ProcessGroupTransport(self.process_group, self.device)
        self._progress = Progress(self._transport, self._transport.store)
        follow(self._progress)
        has_plane = functools.partial(plane_of, self._transport)
        self._control = Control(has_plane if self.options.control_plane else lambda: None, self._progress)

    def _compare_construction(self) -> None:
        options = self.options.compared()
        options["parameters with sparse gradients"] = [n for n, (_, sparse) in self._reduced().items() if sparse]
        with self._progress.waiting(_CONSTRUCTION, "the comparison of models"):
            parameters = compared_specs(self.module.named_parameters(), self.parameters_to_ignore)
            buffers = compared_specs(self.module.named_buffers(), self.parameters_to_ignore)
            check_construction(self._transport, parameters, buffers, options)

    def _broadcast_state(self) -> None:
        with self._progress.waiting(_CONSTRUCTION, "the broadcast of rank 0's state"):
            self._send_module(source=0, buffers=self.options.sync_buffers_at_construction)

    def _send_module(self, source: int, buffers: bool) -> None:
        ignored, size = self.parameters_to_ignore, self.broadcast_bucket_size
        broadcast_module(self.process_group, self.module, ignored, size, source, buffers)

    def _make_reducer(self) -> None:
        """Builds the reducer of the module as it is now; construction, unpickling and deepcopy end here."""
        self._mixed = self._make_mixed_precision()
        self.reducer = self._new_reducer()
        for hook, state in self._comm_hooks:
            self._use_hook(CommHook(hook, state))
        self.reducer.on_unreduced = weak_call(self._warn_unreduced)
        self._warned_unreduced = False
        self._hooks_compared = False
        self._watch = ModuleWatch(self, self.reducer.params, self.parameters_to_ignore, casts=self._mixed is not None)

    def _new_reducer(self) -> GradientReducer:
        return GradientReducer(*self._reducer_arguments())

    def _reducer_arguments(self) -> tuple[Any, ...]:
        own = (self._mixed, self._post_reduction, self._progress, self._control)
        return self._reduced(), self._transport, self.options, *own

    def _reduced(self) -> dict[str, tuple[nn.Parameter, bool]]:
        return reduced_parameters(self.module, self.parameters_to_ignore)

    def _make_mixed_precision(self) -> MixedPrecision | None:
        if self.options.mixed_precision is None:
            return None
        buffers = [b for n, b in self.module.named_buffers() if n not in self.parameters_to_ignore]
        return MixedPrecision(self.options.mixed_precision, self._module_parameters, buffers)

    def _use_hook(self, hook: CommHook) -> None:
        backend = self._transport.backend_name
        working = working_hook(hook.hook, backend)
        self.reducer.register_comm_hook(CommHook(working, hook.state, must_run_alone(working, backend)))

    def _compare_hooks(self) -> None:
        """Once, with a small collective: all ranks registered the same hooks, or a bucket would be reduced two ways."""
        self._hooks_compared = True
        if not self.options.init_sync or self._join_config.enable:
            return
        hook, buffer_hook = self.reducer.comm_hook, getattr(self, "buffer_hook", None)
        options = {
            "the comm hook": hook and describe(hook.hook, hook.state),
            "the buffer hook": buffer_hook
            and describe(buffer_hook.buffer_comm_hook, buffer_hook.buffer_comm_hook_state),
            "static_graph": self.options.static_graph,
        }
        with self._progress.waiting("the first synchronising forward", "the comparison of hooks"):
            check_construction(self._transport, [], [], options)

    def _follow_module(self) -> None:
        """Makes another reducer for a module that was changed after wrapping, as if it was wrapped now."""
        if self._mixed is not None:
            self._mixed.restore()
        self.parameters_to_ignore = self._watch.ignored_now()
        self._take_parameters(self.module)
        self._assign_modules_buffers()
        if self.options.init_sync:
            self._compare_construction()
            if not self._is_equal_everywhere():
                self._broadcast_state()
        self._replace_reducer()

    def _is_equal_everywhere(self) -> bool:
        """Whether rank 0's state needs no sending: graphs that have saved parameters could not be run after it."""
        buffers = self.module.named_buffers() if self.options.sync_buffers_at_construction else ()
        state = {n: t for n, t in (*self.module.named_parameters(), *buffers) if n not in self.parameters_to_ignore}
        with torch.no_grad(), self._progress.waiting(_CONSTRUCTION, "the comparison of parameters"):
            return are_equal(self._transport, state)

    def _follow_module_inside(self) -> None:
        """Makes another reducer for a module that its forward has changed, before the backward pass.

        Raises:
            MisuseError: parameters are lowered by mixed precision now.
            ConstructionMismatchError, ReplicaMismatchError: the module differs between ranks now, or parameters that
                were made in the forward do.
        """
        if self._mixed is not None:
            raise MisuseError(
                "the forward added, replaced or unfroze parameters, which mixed_precision cannot follow. Change the "
                "module before the forward"
            )
        self._announce(Event.FORWARD, Does.FOLLOWS_MODULE_AFTER)
        known = self._watch.known
        self._take_parameters(self.module)
        self._assign_modules_buffers()
        if self.options.init_sync:
            self._compare_construction()
            # What the forward has used cannot be replaced by rank 0's any more.
            ignored = self.parameters_to_ignore
            made = {n: p for n, p in self.module.named_parameters() if n not in ignored and p not in known}
            with torch.no_grad(), self._progress.waiting(self._progress.forward_name, "the comparison of parameters"):
                check_replicas(self._transport, made, "parameter")
        self._replace_reducer()

    def _replace_reducer(self) -> None:
        before = self.reducer
        before.remove_hooks()
        self._has_rebuilt_buckets = False
        self._make_reducer()
        self.reducer.take_over(before)
        names = dict(zip(self.reducer.params, self.reducer.names, strict=True))
        self._post_reduction.rename({n: names.get(p, n) for n, p in zip(before.names, before.params, strict=True)})

    def _warn_unreduced(self) -> bool:
        if not self._grad_sync:
            return False
        if self._warned_unreduced:
            return True
        self._warned_unreduced = True
        warnings.warn(
            "a backward pass reached parameters of this DistributedDataParallel without passing an output of it, and "
            "its gradients were not reduced: they differ between ranks. Call the wrapper, not wrapper.module, or call "
            "sync_gradients() after the backward pass; if gradients are to stay local, use no_sync().",
            stacklevel=2,
        )
        return True

    @property
    def plan(self) -> BucketPlan:
        """The buckets, in launch order. They are rebuilt once, at the start of the second iteration."""
        return self.reducer.plan

    # --- forward

    def _announce(self, event: Event, does: Does) -> None:
        self._control.announce(Step(event, self._progress.backwards, does=does))
        self._control.settle(self._progress.forward_name, "before anything of it was communicated")

    def register_comm_hook(self, state: object, hook: Callable[[Any, Any], torch.futures.Future[torch.Tensor]]) -> None:
        """Replaces the all-reduce of each bucket.

        Args:
            state: handed to the hook; each rank has its own.
            hook: `hook(state, bucket)`, which gets a bucket with torch's `GradBucket` interface, not divided by the
                world size, and returns a future of one tensor shaped as `bucket.buffer()`.

        Raises:
            TypeError, ValueError: it cannot be a comm hook.
            RuntimeError: one is registered already, or a backward pass is under way.
        """
        with self.reducer.errors_noted():
            self._check_comm_hook(hook)
            self._use_hook(CommHook(hook, state))
        self._comm_hooks.append((hook, state))

    def _check_comm_hook(self, hook: Any) -> None:
        check_comm_hook(hook)

    # --- pickling and deepcopy

    def __getstate__(self) -> dict[str, Any]:
        self._check_default_group()
        attrs = copy.copy(self.__dict__)
        for name in self._left_behind:
            del attrs[name]
        return attrs

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.process_group = _get_default_group()
        nn.Module.__setstate__(self, state)
        self._has_rebuilt_buckets = False
        self._join_group()
        self._make_reducer()
