"""ZeroRedundancyOptimizer overlapped with the reduction, also on gloo, which torch's hooks refuse."""

import weakref
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer


Hook = Callable[[Any, dist.GradBucket], torch.futures.Future]


def hook_with_zero_step(
    hook: Hook, ddp: DistributedDataParallel, zero: "ZeroRedundancyOptimizer", shard_buckets: bool = False
) -> Hook:
    """Returns a comm hook that reduces by `hook` and then steps `zero`, made with `overlap_with_ddp=True`.

    On gloo each bucket's step follows its reduction; elsewhere this is torch's hook of that name.

    Args:
        hook: reduces a bucket.
        ddp: the wrapper that the hook is then registered on.
        zero: the optimizer over its parameters.
        shard_buckets: let several ranks share a bucket's parameters.

    Raises:
        ValueError: `zero` was made without `overlap_with_ddp=True`.
    """
    if not _on_gloo(ddp):
        return _torchs().hook_with_zero_step(hook, ddp, zero, shard_buckets)
    return _bucket_by_bucket(hook, ddp, zero, shard_buckets)


def hook_with_zero_step_interleaved(
    hook: Hook, ddp: DistributedDataParallel, zero: "ZeroRedundancyOptimizer", shard_buckets: bool = False
) -> Hook:
    """As `hook_with_zero_step`, but elsewhere than on gloo torch's interleaved hook."""
    if not _on_gloo(ddp):
        return _torchs().hook_with_zero_step_interleaved(hook, ddp, zero, shard_buckets)
    return _bucket_by_bucket(hook, ddp, zero, shard_buckets)


def _torchs() -> ModuleType:
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook  # compiles optimizers when imported

    return ddp_zero_hook


def _on_gloo(ddp: DistributedDataParallel) -> bool:
    return ddp.process_group._get_backend(ddp.device).name() == dist.Backend.GLOO


def _bucket_by_bucket(
    hook: Hook, ddp: DistributedDataParallel, zero: "ZeroRedundancyOptimizer", shard_buckets: bool
) -> Hook:
    """Waits for a bucket here, on the thread that launched it: gloo's own two threads must stay free to communicate."""
    if not zero._overlap_with_ddp:
        raise ValueError("ZeroRedundancyOptimizer must be constructed with `overlap_with_ddp=True` to use this hook")
    ddp_ref = weakref.ref(ddp)
    if shard_buckets:
        zero._overlap_info.shard_buckets = True
        zero._overlap_info.total_size = 0
    torchs = _torchs()

    def hook_with_zero_step(state: Any, bucket: dist.GradBucket) -> torch.futures.Future:
        future = hook(state, bucket)
        torchs._hook_with_zero_step_setup(ddp_ref, zero, bucket)
        info = zero._overlap_info
        if info.status != torchs._OverlapStatus.INITIALIZED:
            return future
        future.wait()
        if zero.global_rank in info.assigned_ranks_per_bucket[bucket.index()]:
            torchs._perform_local_step(bucket, zero, zero.global_rank)
        torchs._broadcast_bucket(bucket.index(), zero)
        info.bucket_indices_seen.append(bucket.index())
        if len(info.bucket_indices_seen) == len(info.params_per_bucket):
            info.wait_for_broadcasts()
            info.clear_per_iter_info()
        return future

    return hook_with_zero_step
