"""Optimizers and averagers of torch.distributed on top of the wrapper."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import MLP, ConvNet
from support.oracle import mean_over_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer, _apply_optimizer_in_backward

from unified_ddp.torch import DistributedDataParallel, comm_hooks


def oracle_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """One step of a copy on this rank, by the mean of the gradients."""
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    for p in model.parameters():
        mean = mean_over_ranks(p.grad, p)
        p.grad = None if mean is None else mean.to(p.dtype)
    optimizer.step()


def assert_equal_models(a: nn.Module, b: nn.Module) -> None:
    for mine, theirs in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


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


def case_post_local_sgd(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(MLP())
    state = post_localSGD_hook.PostLocalSGDState(None, dist.group.WORLD, start_localSGD_iter=2)
    ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(ddp.parameters(), lr=0.05), PeriodicModelAverager(period=2, warmup_steps=2)
    )
    for _ in range(8):
        optimizer.zero_grad()
        ddp(torch.randn(5, 8)).pow(2).mean().backward()
        optimizer.step()
    for p in ddp.parameters():
        assert p.grad is not None
        everybodys = [torch.empty_like(p) for _ in range(world_size)]
        dist.all_gather(everybodys, p.detach().clone())
        spread = max((e - everybodys[0]).abs().max().item() for e in everybodys)
        assert spread < 1e-2
    optimizer.load_state_dict(optimizer.state_dict())


def test_post_local_sgd(world: Callable[[int], Any]) -> None:
    world(2).run(case_post_local_sgd)


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


def case_joinables(rank: int, world_size: int) -> None:
    models = [DistributedDataParallel(MLP()), DistributedDataParallel(ConvNet())]
    params = [p for m in models for p in m.parameters()]
    optimizer = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.05)
    done = 0
    with Join([*models, optimizer]):
        for _ in range(3 + 2 * rank):
            optimizer.zero_grad()
            # one model after the other, as joined ranks shadow them
            models[0](torch.randn(5, 8)).pow(2).mean().backward()
            models[1](torch.randn(5, 64)).pow(2).mean().backward()
            optimizer.step()
            done += 1
    assert done == 3 + 2 * rank
    for p in params:
        everybodys = [torch.empty_like(p) for _ in range(world_size)]
        dist.all_gather(everybodys, p.detach().clone())
        assert all(torch.equal(e, everybodys[0]) for e in everybodys)


def test_several_joinables(world: Callable[[int], Any]) -> None:
    world(2).run(case_joinables)
