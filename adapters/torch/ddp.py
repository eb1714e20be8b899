"""DistributedDataParallel over our own reducer."""

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
from unified_ddp.torch.extensions import DDPExtensions
from unified_ddp.torch.module.watch import ModuleWatch
from unified_ddp.torch.parity.join import DDPJoinHook
from unified_ddp.torch.parity.logging_data import DDPLogger, module_facts
from unified_ddp.torch.parity.members import DDPMembers
from unified_ddp.torch.reduction.comm_hook import CommHook, check_comm_hook, hook_name
from unified_ddp.torch.reduction.gradient_reducer import GradientReducer, ReducerOptions
from unified_ddp.torch.reduction.mixed_precision import MixedPrecision
from unified_ddp.torch.reduction.post_reduction import PostReductionHooks
from unified_ddp.torch.reduction.transport import ProcessGroupTransport
from unified_ddp.torch.schema import compared_specs, reduced_parameters
from unified_ddp.weak import weak_call

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(DDPExtensions, DDPMembers, TorchDDP):  # type: ignore[misc]
    """Data parallelism over the ranks of a process group: gradients are averaged during the backward pass.

    A drop-in for `torch.nn.parallel.DistributedDataParallel` (torch 2.13), whose arguments it takes in the same order
    and with the same meaning; a subclass of it, so that `isinstance` checks hold, and of nothing in it: neither its
    constructor nor its reducer is ever used.

    After a synchronising backward pass each parameter's `.grad` is, on every rank, the mean over ranks of the gradient
    that plain autograd would have left there, for every program that plain autograd accepts; or a named error is
    raised.

    Args:
        module: the module; its parameters' values are taken from rank 0.
        device_ids: the one accelerator of a single-device module, or None.
        output_device: where the outputs are; `device_ids[0]` if None.
        dim: along which `scatter` and `gather` cut.
        broadcast_buffers: deprecated, use `forward_sync_buffers`; False also leaves buffers out of the initial sync.
        init_sync: compare the ranks' construction and broadcast rank 0's parameters and buffers. If False, nothing is
            communicated, and equal models are the caller's business.
        process_group: the ranks; None means the default group.
        bucket_cap_mb: bucket cap in MiB; None means 25, after a first bucket of 1.
        find_unused_parameters: parameters may be left out of the loss; those that no rank used keep their `.grad`.
        check_reduction: deprecated, without effect.
        gradient_as_bucket_view: `.grad` is a view of the bucket's storage, which saves a copy and the memory of it.
        static_graph: the set of used parameters is the same in every iteration as in the first.
        delay_all_reduce_named_params: names and parameters that are reduced apart from the buckets.
        param_to_hook_all_reduce: the parameter whose gradient triggers their reduction.
        mixed_precision: torch's `_MixedPrecision`.
        device_mesh: a one-dimensional mesh instead of a process group.
        skip_all_reduce_unused_params: do not reduce buckets without a used parameter; all ranks leave out the same.
        bucket_cap_mb_list: one cap in MiB a bucket; the last one repeats.
        batched_grad_copy: accepted; gradients are packed fused in any case.
        forward_sync_buffers: broadcast rank 0's buffers before each forward; None means True.
        reduction: "mean" over ranks, "sum", or "weighted_mean" by what each rank gives to `set_weight`.
        check_replicas_every: compare the ranks' parameters before every so many steps (see `check_replicas`); None
            means never.

    Raises:
        ConstructionMismatchError: on all ranks, if they were constructed with different models or options.
        TypeError, ValueError: an argument that cannot be right, with its value.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        reduction: str = "mean",
        check_replicas_every: int | None = None,
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        caps = opts.BucketCaps.from_arguments(bucket_cap_mb, bucket_cap_mb_list)
        delayed = opts.check_delayed(module, delay_all_reduce_named_params, param_to_hook_all_reduce)
        self.process_group, mesh = opts.resolve_group(module, process_group, device_mesh)
        if mesh is not None:
            self.device_mesh = mesh
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._take_parameters(module)
        placement = opts.Placement.of(self._module_parameters, device_ids, output_device)
        self.is_multi_device_module = placement.multi_device
        self.device_type, self.device = placement.device.type, placement.device
        self.device_ids, self.output_device = placement.device_ids, placement.output_device
        self.dim = dim
        self.module = module
        self.forward_sync_buffers, init_sync_buffers = opts.resolve_buffer_sync(broadcast_buffers, forward_sync_buffers)
        opts.warn_deprecated(check_reduction)
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.batched_grad_copy = batched_grad_copy
        self.reduction = opts.check_reduction_name(reduction)
        self.check_replicas_every = opts.check_every(check_replicas_every)
        self._steps = 0
        self.mixed_precision = mixed_precision
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.use_side_stream_for_tensor_copies = opts.use_side_stream()
        self.broadcast_bucket_size = 250 * 1024 * 1024
        self._caps = caps
        self._delayed_names = frozenset(delayed)
        self._delay_all_reduce_params = list(delayed.values())
        self.bucket_bytes_cap = caps.largest
        self.bucket_bytes_cap_list = list(caps.per_bucket)
        self.bucket_bytes_cap_default = caps.is_default
        self._comm_hooks: list[tuple[Callable[..., Any], object]] = []
        self._builtin_hook: dist.BuiltinCommHookType | None = None
        self._accum_grad_hooks: list[Any] = []
        self._post_reduction = PostReductionHooks()
        self._lazy_init_ran = False
        self._has_rebuilt_buckets = False
        self._ddp_sink_clone = True
        self._divide_by_initial_world_size = True
        self._assign_modules_buffers()
        self._join_group()
        self._init_sync_buffers = init_sync_buffers if init_sync else None
        if init_sync:
            self._init_sync(init_sync_buffers)
        self._make_reducer()

    def _take_parameters(self, module: nn.Module) -> None:
        self._module_parameters = [p for n, p in module.named_parameters() if n not in self.parameters_to_ignore]
        opts.check_parameters(self._module_parameters)

    def _init_sync(self, init_sync_buffers: bool) -> None:
        options = {
            "find_unused_parameters": self.find_unused_parameters,
            "static_graph": self.static_graph,
            "forward_sync_buffers": self.forward_sync_buffers,
            "sync buffers at construction": init_sync_buffers,
            "skip_all_reduce_unused_params": self.skip_all_reduce_unused_params,
            "mixed_precision": None if self.mixed_precision is None else repr(self.mixed_precision),
            "delay_all_reduce_named_params": sorted(self._delayed_names),
            "parameters with sparse gradients": [n for n, (_, sparse) in self._reduced_parameters().items() if sparse],
            "reduction": self.reduction,
            "check_replicas_every": self.check_replicas_every,
            "bucket caps in bytes": [self._caps.largest, *self._caps.per_bucket],
        }
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
                broadcast_buffers=init_sync_buffers,
            )

    def _join_group(self) -> None:
        self._transport = ProcessGroupTransport(self.process_group, self.device)
        self._progress = Progress(self._transport, self._transport.store)

    def _make_reducer(self) -> None:
        """Builds the reducer of the module as it is now; construction, unpickling and deepcopy end here."""
        self._passing_sync_batchnorm_handle(self.module)
        self._mixed = self._make_mixed_precision()
        self.reducer = GradientReducer(
            self._reduced_parameters(),
            self._transport,
            ReducerOptions(
                initial_caps=self._caps.initial(self.static_graph, self.find_unused_parameters),
                rebuilt_caps=self._caps.rebuilt(),
                find_unused=self.find_unused_parameters,
                as_views=self.gradient_as_bucket_view,
                static_graph=self.static_graph,
                bucket_cap_bytes=self.bucket_bytes_cap,
                skip_unused=self.skip_all_reduce_unused_params,
                delayed=self._delayed_names,
                reduction=self.reduction,
            ),
            self._mixed,
            self._post_reduction,
            progress=self._progress,
        )
        self.logger = DDPLogger(self.reducer)
        self.reducer.set_logger(self.logger)
        self.logger.set_construction_data_and_log(
            device_ids=self.device_ids or [],
            output_device=-1 if self.output_device is None else self.output_device,
            broadcast_buffers=self.forward_sync_buffers,
            static_graph=self.static_graph,
            **module_facts(self.module),
        )
        for hook, state in self._comm_hooks:
            self._use_hook(CommHook(hook, state))
        if self._builtin_hook is not None:
            self._register_builtin_comm_hook(self._builtin_hook)
        self.reducer.on_unreduced = weak_call(self._warn_unreduced)
        self._warned_unreduced = False
        self._hooks_compared = False
        reduced = self.reducer.params
        self._watch = ModuleWatch(self.module, reduced, self.parameters_to_ignore, self._mixed is not None)

    def _compare_hooks(self) -> None:
        """Once, with a small collective: all ranks registered the same hooks, or a bucket would be reduced two ways."""
        self._hooks_compared = True
        if self._init_sync_buffers is None or self._join_config.enable:
            return
        hook, buffer_hook = self.reducer.comm_hook, getattr(self, "buffer_hook", None)
        options = {
            "the comm hook": hook and hook_name(hook.hook),
            "the buffer hook": buffer_hook and hook_name(buffer_hook.buffer_comm_hook),
            "static_graph": self.static_graph,
        }
        with self._progress.waiting("the first synchronising forward", "the comparison of hooks"):
            check_construction(self._transport, [], [], options)

    def _follow_module(self) -> None:
        """Makes another reducer for a module that was changed after wrapping, as if it was wrapped now."""
        if self._mixed is not None:
            self._mixed.restore()
        self._take_parameters(self.module)
        self._assign_modules_buffers()
        if self._init_sync_buffers is not None:
            self._init_sync(self._init_sync_buffers)
        before = self.reducer
        before.remove_hooks()
        self._has_rebuilt_buckets = False
        self._lazy_init_ran = False
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

    def _make_mixed_precision(self) -> MixedPrecision | None:
        if self.mixed_precision is None:
            return None
        buffers = [b for n, b in self.module.named_buffers() if n not in self.parameters_to_ignore]
        return MixedPrecision(self.mixed_precision, self._module_parameters, buffers)

    def _reduced_parameters(self) -> dict[str, tuple[nn.Parameter, bool]]:
        return reduced_parameters(self.module, self.parameters_to_ignore)

    def _use_hook(self, hook: CommHook) -> None:
        backend = self._transport.backend_name
        working = working_hook(hook.hook, backend)
        self.reducer.register_comm_hook(CommHook(working, hook.state, must_run_alone(working, backend)))
        self.logger._set_comm_hook_name(hook_name(hook.hook))

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
        if sync and self._watch.changed():
            self._follow_module()
        if not self._lazy_init_ran:
            self._lazy_init()
        with self.reducer.errors_logged():
            if grads:
                self._progress.forward(sync)
                if dist.get_debug_level() == dist.DebugLevel.DETAIL and not self._join_config.enable:
                    self._progress.compare_no_sync(sync)
            if sync and not self._hooks_compared:
                self._compare_hooks()
            if sync:
                self.logger.set_runtime_stats_and_log()
                self._prepare_for_forward()
            work = Join.notify_join_context(self)
            if work:
                self.reducer._set_forward_pass_work_handle(work, self._divide_by_initial_world_size)
            if grads and self.reducer.rebuild_buckets():
                self._has_rebuilt_buckets = True
        if sync:
            self._count_step()
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

    def join_hook(self, **kwargs: Any) -> DDPJoinHook:
        """Returns the hook with which this module takes part in a `Join` context.

        Args:
            kwargs: `divide_by_initial_world_size` (True): divide gradients by all ranks, also by those without inputs.
        """
        return DDPJoinHook(self, kwargs.get("divide_by_initial_world_size", True))

    # --- comm hooks

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
        with self.reducer.errors_logged():
            check_comm_hook(hook)
            self._use_hook(CommHook(hook, state))
        self._comm_hooks.append((hook, state))

    # --- pickling and deepcopy

    def __getstate__(self) -> dict[str, Any]:
        self._check_default_group()
        attrs = copy.copy(self.__dict__)
        for name in ("process_group", "reducer", "logger", "_mixed", "_transport", "_progress", "_watch"):
            del attrs[name]
        return attrs

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.process_group = _get_default_group()
        nn.Module.__setstate__(self, state)
        # the optimizers to step in the backward pass belong to the copy's parameters
        self._lazy_init_ran = False
        self._has_rebuilt_buckets = False
        self._join_group()
        self._make_reducer()

    def _log_and_throw(self, err_type: type[Exception], err_msg: str) -> None:
        if "logger" in self.__dict__:
            self.logger.set_error_and_log(f"{err_type}: {err_msg}")
        raise err_type(err_msg)
