"""Logging data under the keys of torch's logger."""

from collections.abc import Callable
from typing import Any

import torch
from support.models import MLP
from torch import nn

from unified_ddp.torch import DistributedDataParallel


def backward(module: nn.Module, x: torch.Tensor) -> None:
    module(x).pow(2).mean().backward()


def case_logging(rank: int, world_size: int) -> dict[str, Any]:
    ddp = DistributedDataParallel(MLP())
    for _ in range(3):
        backward(ddp, torch.randn(5, 8))
    return ddp._get_ddp_logging_data()


def test_logging_data(world: Callable[[int], Any]) -> None:
    for rank, data in enumerate(world(2).run(case_logging)):
        assert data["rank"] == rank
        assert data["world_size"] == 2
        assert data["iteration"] == 2
        assert data["num_buckets_reduced"] == 1
        assert data["can_set_static_graph"] == 1
        assert data["avg_backward_comm_time"] > 0
