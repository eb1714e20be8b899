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


class Table(nn.Module):
    """A buffer that a graph saves, under two names, and others that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.part = nn.Module()
        self.register_buffer("saved", torch.zeros(3))
        self.part.register_buffer("again", self.saved)
        self.register_buffer("free", torch.zeros(2, 2).t())
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("empty", torch.empty(0))


def case_saved(rank: int, world_size: int, source: int, equal: bool) -> None:
    ddp = DistributedDataParallel(Table())
    table = ddp.module
    mine, sent = (5, 5) if equal else (rank, source)
    for buffer in table.buffers():
        buffer.fill_(mine)
    before = dict(table.named_buffers())
    out = (table.weight * table.saved).sum()
    ddp._default_broadcast_coalesced(authoritative_rank=source)
    after = dict(table.named_buffers())
    assert list(after) == list(before)
    assert all(bool((b == sent).all()) for b in after.values())
    replaced = set() if mine == sent else {"saved"}
    assert {name for name in before if after[name] is not before[name]} == replaced
    assert table.part.again is table.saved
    ddp._default_broadcast_coalesced(authoritative_rank=source)
    assert table.saved is after["saved"]
    (grad,) = torch.autograd.grad(out, table.weight)  # with the value of its forward
    assert grad.tolist() == [mine] * 3


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("source", [0, 1])
def test_a_graph_keeps_the_value_that_it_saved(world: Callable[[int], Any], source: int, equal: bool) -> None:
    world(2).run(case_saved, source=source, equal=equal)
