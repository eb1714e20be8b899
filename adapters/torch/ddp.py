"""DistributedDataParallel over our own reducer."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.utils import _sync_module_states
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _find_tensors

from unified_ddp.plan import BucketPlan
from unified_ddp.torch import options as opts
from unified_ddp.torch.construction import check_construction, describe
from unified_ddp.torch.gradient_reducer import GradientReducer, ReducerOptions
from unified_ddp.torch.hooks import CommHook, check_comm_hook
from unified_ddp.torch.schema import reduced_parameters
from unified_ddp.torch.transport import ProcessGroupTransport

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(TorchDDP):
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
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        opts.refuse_unsupported(
            delay_all_reduce_named_params=delay_all_reduce_named_params,
            param_to_hook_all_reduce=param_to_hook_all_reduce,
            mixed_precision=mixed_precision,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params or None,
        )
        caps = opts.BucketCaps.from_arguments(bucket_cap_mb, bucket_cap_mb_list)
        self.logger = None
        self.process_group, mesh = opts.resolve_group(module, process_group, device_mesh)
        if mesh is not None:
            self.device_mesh = mesh
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._module_parameters = [p for n, p in module.named_parameters() if n not in self.parameters_to_ignore]
        opts.check_parameters(self._module_parameters)
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
        self.mixed_precision = mixed_precision
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.use_side_stream_for_tensor_copies = opts.use_side_stream()
        self.broadcast_bucket_size = 250 * 1024 * 1024
        self._caps = caps
        self.bucket_bytes_cap = caps.largest
        self.bucket_bytes_cap_list = list(caps.per_bucket)
        self.bucket_bytes_cap_default = caps.is_default
        self._comm_hooks: list[tuple[Callable[..., Any], object]] = []
        self._assign_modules_buffers()
        if init_sync:
            self._init_sync(init_sync_buffers)
        self._make_reducer()

    def _init_sync(self, init_sync_buffers: bool) -> None:
        options = {
            "find_unused_parameters": self.find_unused_parameters,
            "static_graph": self.static_graph,
            "forward_sync_buffers": self.forward_sync_buffers,
            "sync buffers at construction": init_sync_buffers,
            "bucket caps in bytes": [self._caps.largest, *self._caps.per_bucket],
        }
        check_construction(self._transport(), describe(self.module, self.parameters_to_ignore, options))
        _sync_module_states(
            module=self.module,
            process_group=self.process_group,
            broadcast_bucket_size=self.broadcast_bucket_size,
            src=0,
            params_and_buffers_to_ignore=self.parameters_to_ignore,
            broadcast_buffers=init_sync_buffers,
        )

    def _transport(self) -> ProcessGroupTransport:
        return ProcessGroupTransport(self.process_group, self.device)

    def _make_reducer(self) -> None:
        """Builds the reducer of the module as it is now; construction, unpickling and deepcopy end here."""
        self._passing_sync_batchnorm_handle(self.module)
        self.reducer = GradientReducer(
            reduced_parameters(self.module, self.parameters_to_ignore),
            self._transport(),
            ReducerOptions(
                initial_caps=self._caps.initial(self.static_graph, self.find_unused_parameters),
                rebuilt_caps=self._caps.rebuilt(),
                find_unused=self.find_unused_parameters,
                as_views=self.gradient_as_bucket_view,
                static_graph=self.static_graph,
            ),
        )
        for hook, state in self._comm_hooks:
            self.reducer.register_comm_hook(CommHook(hook, state))

    @property
    def plan(self) -> BucketPlan:
        """The buckets, in launch order. They are rebuilt once, at the start of the second iteration."""
        return self.reducer.plan

    # --- forward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module; a backward pass through what it returns reduces the gradients."""
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            with self._inside_ddp_forward():
                output = self.module(*inputs, **kwargs)
            return self._post_forward(output)

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        if torch.is_grad_enabled():
            if self.require_backward_grad_sync:
                self.reducer.prepare_for_forward()
            self.reducer.rebuild_buckets()
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers()
        if self.device_ids:
            moved_inputs, moved_kwargs = self.to_kwargs(inputs, kwargs, self.device_ids[0])
            return moved_inputs[0], moved_kwargs[0]
        return inputs, kwargs

    def _post_forward(self, output: Any) -> Any:
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self.require_forward_param_sync = True
            self.reducer.prepare_for_backward(_find_tensors(output))
        else:
            self.require_forward_param_sync = False
            self.reducer.disarm()
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forwards in this context leave gradients local; they are reduced with the next synchronising backward pass.

        The forward must be inside; a backward pass is synchronising if its forward was.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

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
        check_comm_hook(hook)
        self.reducer.register_comm_hook(CommHook(hook, state))
        self._comm_hooks.append((hook, state))

    # --- pickling and deepcopy

    def __getstate__(self) -> dict[str, Any]:
        self._check_default_group()
        attrs = copy.copy(self.__dict__)
        for name in ("process_group", "reducer", "logger"):
            del attrs[name]
        return attrs

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.process_group = _get_default_group()
        nn.Module.__setstate__(self, state)
        self.logger = None
        self._make_reducer()

    def _log_and_throw(self, err_type: type[Exception], err_msg: str) -> None:
        raise err_type(err_msg)
