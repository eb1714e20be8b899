"""TORCH_DISTRIBUTED_DEBUG on CPUs: whatever the level, gradients are right and errors keep their names."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import MLP, TwoHeads
from support.oracle import check_step
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel.distributed import _MixedPrecision

from unified_ddp.errors import ConstructionMismatchError, UnusedParameterError
from unified_ddp.torch import DistributedDataParallel, SyncBatchNorm


def backward(module: nn.Module, x: torch.Tensor) -> None:
    module(x).float().pow(2).mean().backward()


def case_level(rank: int, world_size: int, level: str) -> None:
    before = dist.get_debug_level()
    dist.set_debug_level(getattr(dist.DebugLevel, level))
    try:
        train_all(rank, dist.new_group())
    finally:
        dist.set_debug_level(before)


def train_all(rank: int, group: dist.ProcessGroup) -> None:
    def wrap(module: nn.Module, **options: Any) -> DistributedDataParallel:
        return DistributedDataParallel(module, process_group=group, **options)

    x = torch.randn(5, 8)
    plain = wrap(MLP(), bucket_cap_mb=0.0005, check_replicas_every=2)
    for _ in range(3):
        check_step(plain, lambda m: backward(m, x))
    for dtype in (torch.float16, torch.bfloat16):
        config = _MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32)
        mixed = wrap(MLP(), mixed_precision=config, gradient_as_bucket_view=dtype is torch.float16)
        for _ in range(2):
            check_step(mixed, lambda m: backward(m, x), 0.04)
    for hook in (default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook):
        hooked = wrap(MLP(), bucket_cap_mb=0.002)
        hooked.register_comm_hook(group, hook)
        for _ in range(2):
            check_step(hooked, lambda m: backward(m, x), 0.02)
    normed = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    synced = wrap(SyncBatchNorm.convert_sync_batchnorm(normed))
    check_step(synced, lambda m: backward(m, x))
    heads = wrap(TwoHeads(), find_unused_parameters=True)
    check_step(heads, lambda m: m(x, "lr"[rank])["lr"[rank]].sum().backward())

    strict = wrap(TwoHeads())
    strict(x, "l")["l"].sum().backward()
    with pytest.raises(UnusedParameterError, match=r"right.weight, right.bias"):
        strict(x, "l")
    with pytest.raises(ConstructionMismatchError, match="on rank 1"):
        wrap(MLP(), find_unused_parameters=rank == 1)


@pytest.mark.parametrize("level", ["OFF", "INFO", "DETAIL"])
def test_debug_levels(world: Callable[[int], Any], level: str) -> None:
    world(2).run(case_level, level=level)
