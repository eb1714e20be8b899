"""Mixed precision: what is lowered, set aside, reduced and restored."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import MLP
from support.oracle import assert_equals_oracle, oracle
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

from unified_ddp.torch import DistributedDataParallel


def backward(module: nn.Module, x: torch.Tensor) -> None:
    module(x).pow(2).mean().backward()


def case_mixed(rank: int, world_size: int, dtype: str, reduce: str | None) -> None:
    low = getattr(torch, dtype)
    config = _MixedPrecision(param_dtype=low, reduce_dtype=getattr(torch, reduce) if reduce else None)
    ddp = DistributedDataParallel(MLP(), mixed_precision=config, bucket_cap_mb=0.002)
    k = 0.03 if low is torch.bfloat16 else 0.01
    for _ in range(3):
        batches = [torch.randn(5, 8) for _ in range(2)]
        ddp.zero_grad()
        expected = oracle(ddp.module, lambda m, b=batches: [backward(m, x) for x in b])
        with ddp.no_sync():
            backward(ddp, batches[0])
        assert all(p.dtype is torch.float32 and p.grad.dtype is torch.float32 for p in ddp.parameters())
        assert ddp(batches[1]).dtype is low
        with torch.no_grad():
            ddp(batches[1])
        assert all(p.dtype is torch.float32 for p in ddp.parameters())
        backward(ddp, batches[1])
        assert all(p.dtype is torch.float32 for p in ddp.parameters())
        assert_equals_oracle(ddp.module, expected, k)
    backward(copy.deepcopy(ddp), batches[0])


@pytest.mark.parametrize(("dtype", "reduce"), [("float16", None), ("bfloat16", None), ("float16", "float32")])
def test_mixed_precision(world: Callable[[int], Any], dtype: str, reduce: str | None) -> None:
    world(2).run(case_mixed, dtype=dtype, reduce=reduce)


def case_evaluates_and_copies(rank: int, world_size: int) -> None:
    config = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ddp = DistributedDataParallel(MLP(), mixed_precision=config)
    x = torch.randn(5, 8)
    backward(ddp, x)
    other = copy.deepcopy(ddp)
    ddp.eval()
    with torch.no_grad():
        assert ddp(x).dtype == torch.bfloat16
    ddp.train()
    for module in (ddp, other):
        assert all(p.dtype == torch.float32 for p in module.parameters())
        module.zero_grad()
        with module.no_sync():
            backward(module, x)
        backward(module, x)
        assert all(p.dtype == torch.float32 and p.grad.dtype == torch.float32 for p in module.parameters())
    for mine, theirs in zip(ddp.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
        everybodys = [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_gather(everybodys, mine.grad)
        assert torch.equal(everybodys[0], everybodys[1])


def test_mixed_precision_evaluates_accumulates_and_copies(world: Callable[[int], Any]) -> None:
    world(2).run(case_evaluates_and_copies)
