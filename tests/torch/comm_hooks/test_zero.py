"""ZeroRedundancyOptimizer, after the reduction and overlapped with it."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import MLP
from support.oracle import assert_equal_models, oracle_step
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer

from unified_ddp.torch import DistributedDataParallel, comm_hooks


def case_zero(rank: int, world_size: int, overlap: str | None, static: bool, view: bool, shard: bool) -> None:
    options = {"gradient_as_bucket_view": view, "static_graph": static}
    # torch's overlapped hook needs rebuilt buckets, several of them
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=0.004 if overlap else None, **options)
    other = copy.deepcopy(ddp.module)
    expected = torch.optim.Adam(other.parameters(), lr=0.01)
    kwargs: dict[str, Any] = {"overlap_with_ddp": True} if overlap else {}
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optimizer_class=torch.optim.Adam, lr=0.01, **kwargs)
    if overlap:
        hook = getattr(comm_hooks, overlap)(default_hooks.allreduce_hook, ddp, optimizer, shard_buckets=shard)
        ddp.register_comm_hook(None, hook)
    # an overlapped optimizer steps from the iteration on in which it knows the rebuilt buckets
    warmup = (3 if static else 2) if overlap else 0
    for i in range(6):
        x = torch.randn(5, 8)
        if i >= warmup:
            oracle_step(other, expected, x)
        ddp.zero_grad()
        ddp(x).pow(2).mean().backward()
        optimizer.step()
        if i == warmup - 1:
            other.load_state_dict(ddp.module.state_dict())
    assert_equal_models(ddp.module, other)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(
    ("overlap", "shard"),
    [
        (None, False),
        ("hook_with_zero_step", False),
        ("hook_with_zero_step_interleaved", False),
        ("hook_with_zero_step", True),
    ],
)
def test_zero_redundancy(
    world: Callable[[int], Any], overlap: str | None, static: bool, view: bool, shard: bool
) -> None:
    world(2).run(case_zero, overlap=overlap, static=static, view=view, shard=shard)


def case_not_overlapped(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(MLP())
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optimizer_class=torch.optim.SGD, lr=0.01)
    for make in (comm_hooks.hook_with_zero_step, comm_hooks.hook_with_zero_step_interleaved):
        with pytest.raises(ValueError, match="must be constructed with `overlap_with_ddp=True`"):
            make(default_hooks.allreduce_hook, ddp, optimizer)


def test_an_optimizer_that_is_not_overlapped(world: Callable[[int], Any]) -> None:
    world(2).run(case_not_overlapped)
