"""The wrapper: forwards that prepare the reduction of the backward passes through their outputs."""

import copy
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.distributed_c10d import _get_default_group
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _find_tensors

from unified_ddp.errors import MisuseError, UnusedParameterError
from unified_ddp.hooks.describe import describe
from unified_ddp.plan import BucketPlan
from unified_ddp.ranks.construction import check_construction
from unified_ddp.ranks.control import Control, Does, Event, Step
from unified_ddp.ranks.progress import Progress
from unified_ddp.torch import options as opts
from unified_ddp.torch.comm_hooks.torchs import must_run_alone, working_hook
from unified_ddp.torch.module.broadcast import broadcast_module
from unified_ddp.torch.module.replicas import check_replicas
from unified_ddp.torch.module.watch import ModuleWatch, names_to_ignore
from unified_ddp.torch.reduction import autograd
from unified_ddp.torch.reduction.comm_hook import CommHook, check_comm_hook
from unified_ddp.torch.reduction.control_plane import plane_of
from unified_ddp.torch.reduction.gradient_reducer import GradientReducer
from unified_ddp.torch.reduction.mixed_precision import MixedPrecision
from unified_ddp.torch.reduction.post_reduction import PostReductionHooks
from unified_ddp.torch.reduction.transport import ProcessGroupTransport
from unified_ddp.torch.schema import compared_specs, reduced_parameters
from unified_ddp.weak import weak_call

_CONSTRUCTION = "construction of DistributedDataParallel"


class AveragingModule(TorchDDP):
    """Runs a module, and averages its gradients over the ranks of a process group in the backward pass.

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

    def _follow_changes(self, does: Does) -> None:
        """Makes another reducer if the module was changed, and compares the comm hooks once."""
        if Does.FOLLOWS_MODULE in does:
            self._follow_module()
        if not self._hooks_compared:
            self._compare_hooks()

    def _follow_module(self) -> None:
        """Makes another reducer for a module that was changed after wrapping, as if it was wrapped now."""
        if self._mixed is not None:
            self._mixed.restore()
        self.parameters_to_ignore = self._watch.ignored_now()
        self._take_parameters(self.module)
        self._assign_modules_buffers()
        if self.options.init_sync:
            self._compare_construction()
            self._broadcast_state()
        self._replace_reducer()

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
        if not self.require_backward_grad_sync:
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

    # Dynamo leaves this frame alone and compiles the module's; what surrounds it is none of its business.
    @torch._disable_dynamo(recursive=False)
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module; a backward pass through what it returns reduces the gradients."""
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            return self._post_forward(self._run_ddp_forward(*inputs, **kwargs))

    @torch._disable_dynamo(recursive=False)
    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self._inside_ddp_forward():
            return self.module(*inputs, **kwargs)

    @torch._disable_dynamo
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        with autograd.outside_functorch():
            self._communicate()
        if self.device_ids:
            moved_inputs, moved_kwargs = self.to_kwargs(inputs, kwargs, self.device_ids[0])
            inputs, kwargs = moved_inputs[0], moved_kwargs[0]
        if self._mixed is not None:
            self._mixed.lower()
            inputs, kwargs = self._mixed.cast_inputs(inputs, kwargs)
        return inputs, kwargs

    def _communicate(self) -> None:
        """What a forward does before the module is run, and what it tells and asks other ranks."""
        grads = torch.is_grad_enabled()
        sync = grads and self.require_backward_grad_sync
        with self.reducer.errors_noted():
            if grads:
                self._progress.forward(sync)
            self._control.is_paused = self._join_config.enable
            does = self._communicates(sync)
            if does or (grads and dist.get_debug_level() == dist.DebugLevel.DETAIL):
                kind = Does.NOTHING if sync else Does.IS_LOCAL if grads else Does.RECORDS_NOTHING
                self._announce(Event.FORWARD, does | kind)
            if sync:
                self.reducer.core.agree()
                self._follow_changes(does)
                self._prepare_for_forward()
            work = Join.notify_join_context(self)
            if work:
                self.reducer.scaling.divide_by_joined(None if self._divide_by_initial_world_size else work)
            if sync and self.reducer.rebuild_buckets():
                self._has_rebuilt_buckets = True
        self._before_module(does)
        if Does.SYNCS_BUFFERS in does:
            with self._progress.waiting(self._progress.forward_name, "the sync of buffers"):
                self._sync_buffers()
        if self._join_config.enable:
            self._check_global_requires_backward_grad_sync(is_joined_rank=False)

    def _communicates(self, sync: bool) -> Does:
        """Returns what a forward communicates beside gradients; the ranks then tell each other."""
        does = Does.NOTHING
        if sync:
            does |= self._prepares()
        if self._check_sync_bufs_pre_fwd():
            does |= Does.SYNCS_BUFFERS
        if self._check_sync_bufs_post_fwd():
            does |= Does.SYNCS_BUFFERS_AFTER
        return does

    def _prepares(self) -> Does:
        """Returns what a reduction needs before it."""
        does = Does.NOTHING
        self.reducer.give_up_what_is_left()
        if self.reducer.core.is_in_doubt:
            does |= Does.AGREES
        if self._watch.changed():
            does |= Does.FOLLOWS_MODULE
        elif self.reducer.has_order_to_rebuild:
            does |= Does.REBUILDS_BUCKETS
        if self.options.init_sync and not (self._hooks_compared or self._join_config.enable):
            does |= Does.COMPARES_HOOKS
        return does

    def _announce(self, event: Event, does: Does) -> None:
        self._control.announce(Step(event, self._progress.backwards, does=does))
        self._control.settle(self._progress.forward_name, "before anything of it was communicated")

    def _before_module(self, does: Does) -> None:
        """Does what else was announced, before the module is run."""

    def _prepare_for_forward(self) -> None:
        try:
            self.reducer.prepare_for_forward()
        except UnusedParameterError:
            if not self._watch.differs():
                raise
            self._announce(Event.FORWARD, Does.FOLLOWS_MODULE)
            self._follow_module()  # the unused parameters are no longer the module's
            self.reducer.prepare_for_forward()

    @torch._disable_dynamo
    def _post_forward(self, output: Any) -> Any:
        sync = torch.is_grad_enabled() and self.require_backward_grad_sync
        with autograd.outside_functorch():
            if self._check_sync_bufs_post_fwd():
                self._sync_buffers()
            if sync and self._watch.changed_inside():
                self._follow_module_inside()
        self.require_forward_param_sync = sync
        self.reducer.prepare_for_backward(_find_tensors(output), sync)
        if self._mixed is not None and not torch.is_grad_enabled():
            self._mixed.restore()
        return output

    @contextmanager
    def no_sync(self, *, enabled: bool = True) -> Iterator[None]:
        """Forwards in this context leave gradients local; they are reduced with the next synchronising backward pass.

        The forward must be inside; a backward pass is synchronising if its forward was.

        Args:
            enabled: False changes nothing, so that one loop serves all microbatches of a step:
                `with ddp.no_sync(enabled=not last): ...`.
        """
        before = self._grad_sync
        self._grad_sync = before and not enabled
        try:
            yield
        finally:
            self._grad_sync = before

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the backward passes through the outputs of the next forward are reduced.

        Set between a forward and its backward pass, it holds for that pass, too.
        """
        return self._grad_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, sync: bool) -> None:
        self._grad_sync = sync
        if "reducer" in self.__dict__:
            self.reducer.say_sync(sync)

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
