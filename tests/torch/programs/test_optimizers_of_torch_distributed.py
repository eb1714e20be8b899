"""Optimizers and averagers of torch.distributed on top of the wrapper."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from support.models import MLP, ConvNet
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

from unified_ddp.torch import DistributedDataParallel


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
