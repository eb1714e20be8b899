"""DistributedDataParallel over our own reducer: its arguments."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from unified_ddp.torch import options as opts
from unified_ddp.torch.parity.members import TorchsMembers


class DistributedDataParallel(TorchsMembers):
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
        check_gradients_every: compare the reduced gradients of every so many backward passes with sums of the ranks'
            local ones made apart, in double precision; for users in doubt. None means never. What a comm hook reduces
            is not compared.
        control_plane: ranks tell each other, on connections of their own, what they do next, so that ranks out of step
            get an error instead of gradients that are mixed with something else.

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
        check_gradients_every: int | None = None,
        control_plane: bool = True,
    ) -> None:
        delayed = opts.check_delayed(module, delay_all_reduce_named_params, param_to_hook_all_reduce)
        caps = opts.BucketCaps.from_arguments(bucket_cap_mb, bucket_cap_mb_list)
        group, mesh = opts.resolve_group(module, process_group, device_mesh)
        sync_in_forward, sync_at_construction = opts.resolve_buffer_sync(broadcast_buffers, forward_sync_buffers)
        opts.warn_deprecated(check_reduction)
        options = opts.Options(
            caps=caps,
            delayed=frozenset(delayed),
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
            batched_grad_copy=batched_grad_copy,
            mixed_precision=mixed_precision,
            forward_sync_buffers=sync_in_forward,
            sync_buffers_at_construction=sync_at_construction,
            init_sync=init_sync,
            reduction=reduction,
            check_replicas_every=check_replicas_every,
            check_gradients_every=check_gradients_every,
            control_plane=control_plane,
        )
        super().__init__(module, group, options, device_ids, output_device, dim)
        if mesh is not None:
            self.device_mesh = mesh
        self._delay_all_reduce_params = list(delayed.values())
