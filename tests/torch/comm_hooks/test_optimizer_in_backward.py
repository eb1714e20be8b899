"""Optimizers stepped in the backward pass."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import MLP
from support.oracle import assert_equal_models, oracle_step
from torch.distributed.optim import _apply_optimizer_in_backward

from unified_ddp.torch import DistributedDataParallel


def case_in_backward(rank: int, world_size: int, how: str, view: bool) -> None:
    torch.manual_seed(5)
    module = MLP()
    other = copy.deepcopy(module)
    if how == "apply":
        _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.05})
    ddp = DistributedDataParallel(module, gradient_as_bucket_view=view)
    if how == "fused":
        ddp._register_fused_optim(torch.optim.SGD, lr=0.05)
    expected = torch.optim.SGD(other.parameters(), lr=0.05)
    for _ in range(5):
        x = torch.randn(5, 8) + rank
        oracle_step(other, expected, x)
        ddp.zero_grad()
        ddp(x).pow(2).mean().backward()
        assert_equal_models(module, other)
        assert how == "fused" or all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("how", ["apply", "fused"])
def test_optimizer_in_backward(world: Callable[[int], Any], how: str, view: bool) -> None:
    world(2).run(case_in_backward, how=how, view=view)
