"""The wrapper: forwards that prepare the reduction of the backward passes through their outputs."""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.utils import _sync_module_states
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _find_tensors

from unified_ddp.errors import UnusedParameterError
from unified_ddp.plan import BucketPlan
from unified_ddp.ranks.construction import check_construction
from unified_ddp.ranks.progress import Progress
from unified_ddp.torch import options as opts
from unified_ddp.torch.comm_hooks.torchs import must_run_alone, working_hook
from unified_ddp.torch.module.watch import ModuleWatch
from unified_ddp.torch.reduction.comm_hook import CommHook, check_comm_hook, hook_name
from unified_ddp.torch.reduction.gradient_reducer import GradientReducer
from unified_ddp.torch.reduction.mixed_precision import MixedPrecision
from unified_ddp.torch.reduction.post_reduction import PostReductionHooks
from unified_ddp.torch.reduction.transport import ProcessGroupTransport
from unified_ddp.torch.schema import compared_specs, reduced_parameters
from unified_ddp.weak import weak_call


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
    _left_behind: tuple[str, ...] = ("process_group", "reducer", "_mixed", "_transport", "_progress", "_watch")

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
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._take_parameters(module)
        placement = opts.Placement.of(self._module_parameters, device_ids, output_device)
        self.is_multi_device_module = placement.multi_device
        self.device_type, self.device = placement.device.type, placement.device
        self.device_ids, self.output_device = placement.device_ids, placement.output_device
        self.dim = dim
        self.module = module
        self.options = options
        self.forward_sync_buffers = options.forward_sync_buffers
        self.require_backward_grad_sync = True
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
            self._init_sync()
        self._make_reducer()

    def _take_parameters(self, module: nn.Module) -> None:
        self._module_parameters = [p for n, p in module.named_parameters() if n not in self.parameters_to_ignore]
        opts.check_parameters(self._module_parameters)

    def _join_group(self) -> None:
        self._transport = ProcessGroupTransport(self.process_group, self.device)
        self._progress = Progress(self._transport, self._transport.store)

    def _init_sync(self) -> None:
        options = self.options.compared()
        options["parameters with sparse gradients"] = [n for n, (_, sparse) in self._reduced().items() if sparse]
        phase = "construction of DistributedDataParallel"
        with self._progress.waiting(phase, "the comparison of models"):
            parameters = compared_specs(self.module.named_parameters(), self.parameters_to_ignore)
            buffers = compared_specs(self.module.named_buffers(), self.parameters_to_ignore)
            check_construction(self._transport, parameters, buffers, options)
        with self._progress.waiting(phase, "the broadcast of rank 0's state"):
            _sync_module_states(
                module=self.module,
                process_group=self.process_group,
                broadcast_bucket_size=self.broadcast_bucket_size,
                src=0,
                params_and_buffers_to_ignore=self.parameters_to_ignore,
                broadcast_buffers=self.options.sync_buffers_at_construction,
            )

    def _make_reducer(self) -> None:
        """Builds the reducer of the module as it is now; construction, unpickling and deepcopy end here."""
        self._mixed = self._make_mixed_precision()
        self.reducer = self._new_reducer()
        for hook, state in self._comm_hooks:
            self._use_hook(CommHook(hook, state))
        self.reducer.on_unreduced = weak_call(self._warn_unreduced)
        self._warned_unreduced = False
        self._hooks_compared = False
        self._watch = ModuleWatch(
            self.module, self.reducer.params, self.parameters_to_ignore, casts=self._mixed is not None
        )

    def _new_reducer(self) -> GradientReducer:
        return GradientReducer(*self._reducer_arguments())

    def _reducer_arguments(self) -> tuple[Any, ...]:
        return self._reduced(), self._transport, self.options, self._mixed, self._post_reduction, self._progress

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
            "the comm hook": hook and hook_name(hook.hook),
            "the buffer hook": buffer_hook and hook_name(buffer_hook.buffer_comm_hook),
            "static_graph": self.options.static_graph,
        }
        with self._progress.waiting("the first synchronising forward", "the comparison of hooks"):
            check_construction(self._transport, [], [], options)

    def _follow_changes(self, sync: bool) -> None:
        """Makes another reducer, before a reduction, if the module was changed since."""
        if sync and self._watch.changed():
            self._follow_module()

    def _follow_module(self) -> None:
        """Makes another reducer for a module that was changed after wrapping, as if it was wrapped now."""
        if self._mixed is not None:
            self._mixed.restore()
        self._take_parameters(self.module)
        self._assign_modules_buffers()
        if self.options.init_sync:
            self._init_sync()
        before = self.reducer
        before.remove_hooks()
        self._has_rebuilt_buckets = False
        self._make_reducer()
        self.reducer.take_over(before)

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
            with self._inside_ddp_forward():
                output = self.module(*inputs, **kwargs)
            return self._post_forward(output)

    @torch._disable_dynamo
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        grads = torch.is_grad_enabled()
        sync = grads and self.require_backward_grad_sync
        self._follow_changes(sync)
        with self.reducer.errors_noted():
            if grads:
                self._progress.forward(sync)
                if dist.get_debug_level() == dist.DebugLevel.DETAIL and not self._join_config.enable:
                    self._progress.compare_no_sync(sync)
            if sync and not self._hooks_compared:
                self._compare_hooks()
            if sync:
                self._prepare_for_forward()
            work = Join.notify_join_context(self)
            if work:
                self.reducer.scaling.divide_by_joined(None if self._divide_by_initial_world_size else work)
            if grads and self.reducer.rebuild_buckets():
                self._has_rebuilt_buckets = True
        if sync:
            self._step_begins()
        if self._check_sync_bufs_pre_fwd():
            with self._progress.waiting(self._progress.forward_name, "the sync of buffers"):
                self._sync_buffers()
        if self._join_config.enable:
            self._check_global_requires_backward_grad_sync(is_joined_rank=False)
        if self.device_ids:
            moved_inputs, moved_kwargs = self.to_kwargs(inputs, kwargs, self.device_ids[0])
            inputs, kwargs = moved_inputs[0], moved_kwargs[0]
        if self._mixed is not None:
            self._mixed.lower()
            inputs, kwargs = self._mixed.cast_inputs(inputs, kwargs)
        return inputs, kwargs

    def _step_begins(self) -> None:
        """Hears of a synchronising forward, when the ranks have agreed that it is one."""

    def _prepare_for_forward(self) -> None:
        try:
            self.reducer.prepare_for_forward()
        except UnusedParameterError:
            if not self._watch.differs():
                raise
            self._follow_module()  # the unused parameters are no longer the module's
            self.reducer.prepare_for_forward()

    @torch._disable_dynamo
    def _post_forward(self, output: Any) -> Any:
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self.require_forward_param_sync = True
            self.reducer.prepare_for_backward(_find_tensors(output))
        else:
            self.require_forward_param_sync = False
            self.reducer.disarm(_find_tensors(output))
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
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = before and not enabled
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

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
            check_comm_hook(hook)
            self._use_hook(CommHook(hook, state))
        self._comm_hooks.append((hook, state))

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
