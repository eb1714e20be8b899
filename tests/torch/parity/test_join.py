"""Uneven inputs: ranks that have none left take part in what the others do."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import MLP, ConvNet
from support.oracle import check_step
from torch import nn
from torch.nn.parallel.distributed import _BufferCommHookLocation

from unified_ddp.torch import DistributedDataParallel


def backward(module: nn.Module, x: torch.Tensor) -> None:
    module(x).pow(2).mean().backward()


def case_join(rank: int, world_size: int, initial: bool, options: dict[str, Any]) -> None:
    ddp = DistributedDataParallel(MLP(), **options)
    steps = 2 + 2 * rank
    for epoch in range(2):
        with ddp.join(divide_by_initial_world_size=initial):
            for step in range(steps):
                active = world_size if step < 2 else world_size - 1
                data = [torch.full((3, 8), 0.1 * (1 + r + step + epoch)) for r in range(world_size)]
                expected: dict[str, torch.Tensor] = {}
                for r in range(world_size - active, world_size):
                    other = copy.deepcopy(ddp.module)
                    backward(other, data[r])
                    for name, p in other.named_parameters():
                        assert p.grad is not None
                        expected[name] = expected.get(name, 0) + p.grad / (world_size if initial else active)
                ddp.zero_grad()
                backward(ddp, data[rank])
                for name, p in ddp.module.named_parameters():
                    torch.testing.assert_close(p.grad, expected[name])
        check_step(ddp, lambda m: backward(m, torch.ones(3, 8) * rank))  # outside the context again
    for p in ddp.parameters():
        every = [torch.empty_like(p) for _ in range(world_size)]
        dist.all_gather(every, p.detach())
        assert torch.equal(every[0], every[1])


@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"bucket_cap_mb": 0.0005, "find_unused_parameters": True}, {"static_graph": True}], ids=str
)
def test_join(world: Callable[[int], Any], initial: bool, options: dict[str, Any]) -> None:
    world(2).run(case_join, initial=initial, options=options)


def case_join_throws(rank: int, world_size: int) -> str:
    ddp = DistributedDataParallel(MLP())

    def train() -> None:
        with ddp.join(throw_on_early_termination=True):
            for _ in range(2 + rank):
                backward(ddp, torch.randn(3, 8))

    with pytest.raises(RuntimeError) as caught:
        train()
    return str(caught.value)


def test_join_can_throw(world: Callable[[int], Any]) -> None:
    for message in world(2).run(case_join_throws):
        assert "exhausted" in message


def case_joined(rank: int, world_size: int) -> int:
    """When all have joined, the model is the one of a rank that joined last."""
    ddp = DistributedDataParallel(ConvNet())
    with ddp.join():
        for _ in range(2 + 2 * (1 - rank)):
            backward(ddp, torch.randn(5, 64))
    state = [t.double() for t in ddp.module.state_dict().values()]
    everybodys = [torch.empty_like(torch.cat([t.reshape(-1) for t in state])) for _ in range(world_size)]
    dist.all_gather(everybodys, torch.cat([t.reshape(-1) for t in state]))
    assert torch.equal(everybodys[0], everybodys[1])
    return ddp._authoritative_rank


def test_authoritative_rank(world: Callable[[int], Any]) -> None:
    assert world(2).run(case_joined) == [0, 0]


def case_buffers_after(rank: int, world_size: int) -> None:
    """A buffer hook after the forward runs on joined ranks, too, as it communicates."""
    ddp = DistributedDataParallel(ConvNet())
    calls: list[int] = []

    def average(state: Any, buffers: dict[str, torch.Tensor]) -> None:
        calls.append(len(buffers))
        for buffer in buffers.values():
            if buffer.is_floating_point():
                dist.all_reduce(buffer)
                buffer.div_(world_size)

    ddp._register_buffer_comm_hook(None, average, _BufferCommHookLocation.POST_FORWARD)
    with ddp.join():
        for _ in range(1 + 2 * rank):
            backward(ddp, torch.randn(5, 64))
    assert len(calls) == 3
    backward(ddp, torch.randn(5, 64))


def test_buffers_after_the_forward(world: Callable[[int], Any]) -> None:
    world(2).run(case_buffers_after)


def case_divisor(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(MLP())
    hook = ddp.join_hook(divide_by_initial_world_size=False)
    assert not ddp._divide_by_initial_world_size
    assert ddp.join_hook() is not hook
    assert ddp._divide_by_initial_world_size
    with ddp.join(divide_by_initial_world_size=False):
        for _ in range(1 + rank):
            backward(ddp, torch.ones(3, 8))
    check_step(ddp, lambda m: backward(m, torch.ones(3, 8) * (rank + 1)))
    with ddp.join(enable=False):
        check_step(ddp, lambda m: backward(m, torch.ones(3, 8) * (rank + 1)))


def test_only_gradients_in_the_context_are_divided_by_those_with_inputs(world: Callable[[int], Any]) -> None:
    world(2).run(case_divisor)
