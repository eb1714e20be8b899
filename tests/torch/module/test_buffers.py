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
from unified_ddp.torch.module.buffers import broadcast_buffers


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

    def __init__(self, value: float) -> None:
        super().__init__()
        self.part = nn.Module()
        self.register_buffer("saved", torch.full((3,), value))
        self.part.register_buffer("again", self.saved)
        self.register_buffer("free", torch.full((2, 2), value).t())
        self.register_buffer("count", torch.tensor(int(value)))
        self.register_buffer("flag", torch.tensor([bool(value)]))
        self.register_buffer("none", torch.empty(0))


def case_saved(rank: int, world_size: int, source: int, equal: bool) -> None:
    table = Table(5.0 if equal else float(rank))
    x = torch.ones(3, requires_grad=True)
    before = dict(table.named_buffers())
    out = (x * table.saved).sum()
    broadcast_buffers(dist.group.WORLD, table, list(table.buffers()), 1 << 20, source)
    value = 5.0 if equal else float(source)
    after = dict(table.named_buffers())
    assert list(after) == list(before)
    assert all(bool((b == value).all()) for n, b in after.items() if n not in ("flag", "none"))
    assert bool(table.flag) == bool(value)
    in_place = {name for name in before if after[name] is before[name]}
    replaced = set() if equal or rank == source else {"saved"}
    assert in_place == set(before) - replaced
    assert table.part.again is table.saved
    out.backward()  # with the value of its forward
    assert x.grad.tolist() == [5.0 if equal else float(rank)] * 3
    held = table.saved
    del out
    broadcast_buffers(dist.group.WORLD, table, list(table.buffers()), 16, source)
    assert table.saved is held


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("source", [0, 1])
def test_a_graph_keeps_the_value_that_it_saved(world: Callable[[int], Any], source: int, equal: bool) -> None:
    world(2).run(case_saved, source=source, equal=equal)
