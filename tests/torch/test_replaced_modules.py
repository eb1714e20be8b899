"""What was registered on a wrapped module holds for what takes its place."""

from collections.abc import Callable
from typing import Any

import torch
from support.models import MLP
from torch import nn

from unified_ddp.torch import DistributedDataParallel


def hooked(rank: int, world_size: int) -> list[str]:
    model = MLP()
    ddp = DistributedDataParallel(model)
    seen: list[str] = []
    ddp.register_post_reduction_hook(lambda name, _param: seen.append(name), [model.head.bias])
    ddp(torch.randn(5, 8)).sum().backward()
    ddp.module = nn.Sequential(model)
    ddp(torch.randn(5, 8)).sum().backward()
    return seen


def test_a_hook_on_a_parameter_is_called_by_its_new_name(world: Callable[[int], Any]) -> None:
    assert world(2).run(hooked) == [["head.bias", "0.head.bias"]] * 2
