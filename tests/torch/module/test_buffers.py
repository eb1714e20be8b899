"""The sync of buffers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import ConvNet
from support.oracle import assert_equals_oracle, oracle
from torch import nn
from torch.nn.parallel.distributed import _BufferCommHookLocation

from unified_ddp.torch import DistributedDataParallel


def backward(module: nn.Module, x: torch.Tensor) -> None:
    module(x).pow(2).mean().backward()


def case_buffer_hook(rank: int, world_size: int, after: bool, future: bool) -> None:
    ddp = DistributedDataParallel(ConvNet())
    called: list[int] = []

    def average(state: Any, buffers: dict[str, torch.Tensor]) -> Any:
        assert state == "state"
        called.append(len(buffers))
        works = [dist.all_reduce(b, async_op=True) for b in buffers.values() if b.is_floating_point()]
        if future:
            return [w.get_future() for w in works]
        for work in works:
            work.wait()
        return None

    where = _BufferCommHookLocation.POST_FORWARD if after else _BufferCommHookLocation.PRE_FORWARD
    ddp._register_buffer_comm_hook("state", average, where)
    for _ in range(2):
        ddp.module.bn.running_mean.fill_(float(rank + 1))
        x = torch.randn(5, 64)
        ddp.zero_grad()
        expected = oracle(ddp.module, lambda m, x=x: backward(m, x))
        backward(ddp, x)
        assert_equals_oracle(ddp.module, expected)
        everybodys = [torch.empty(6) for _ in range(world_size)]
        dist.all_gather(everybodys, ddp.module.bn.running_mean)
        # averaged after the batch's own update: equal; before it: different; futures are waited for after the backward
        if after or not future:
            assert torch.equal(everybodys[0], everybodys[1]) == after
    assert called == [3, 3]


@pytest.mark.parametrize("future", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_buffer_hooks(world: Callable[[int], Any], after: bool, future: bool) -> None:
    world(2).run(case_buffer_hook, after=after, future=future)
