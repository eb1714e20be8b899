"""Another module in the place of the wrapped one."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from support.models import MLP
from support.oracle import check_step
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from faults.table import row


class LowRank(nn.Module):
    """Adapts a frozen module by a low-rank term beside it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x + self.up(self.down(x)))


def train(ddp: Any, steps: int = 3) -> None:
    for _ in range(steps):
        check_step(ddp, lambda m, x=torch.randn(5, 8): m(x).pow(2).mean().backward())


def assert_same_on_all_ranks(module: nn.Module) -> None:
    for name, tensor in module.named_parameters():
        every = [torch.empty_like(tensor.data) for _ in range(dist.get_world_size())]
        dist.all_gather(every, tensor.data)
        assert all(torch.equal(every[0], other) for other in every), f"{name} differs between ranks"


REPLACEMENTS = {
    "its deep copy": copy.deepcopy,
    "a low-rank adapter around it": LowRank,
    "a container of it": nn.Sequential,
    "another model": lambda _module: nn.Sequential(nn.Linear(8, 30), nn.BatchNorm1d(30), nn.Linear(30, 3)),
    "its deep copy, past torch's setters": copy.deepcopy,
}


def replace(ddp: Any, what: str) -> None:
    module = REPLACEMENTS[what](ddp.module)
    if "past" in what:
        ddp._modules["module"] = module
    else:
        ddp.module = module


VARIANTS = [{"what": what} for what in REPLACEMENTS]


@row("ddp.module replaced", "gradients on the new module, which starts from rank 0's values", variants=VARIANTS)
def replaced(ddp_class: Any, rank: int, world_size: int, what: str) -> None:
    ddp = ddp_class(MLP())
    train(ddp)
    torch.manual_seed(rank)
    replace(ddp, what)
    ddp(torch.randn(5, 8)).sum().backward()
    assert_same_on_all_ranks(ddp.module)
    train(ddp)


@row("ddp.module replaced, find_unused_parameters", "gradients on the new module", variants=VARIANTS)
def replaced_unused(ddp_class: Any, rank: int, world_size: int, what: str) -> None:
    ddp = ddp_class(MLP(), find_unused_parameters=True, gradient_as_bucket_view=True)
    train(ddp)
    replace(ddp, what)
    ddp(torch.randn(5, 8)).sum().backward()
    train(ddp)


@row("ddp.module replaced between no_sync and the synchronising step", "what was accumulated counts")
def replaced_while_accumulating(ddp_class: Any, rank: int, world_size: int) -> None:
    ddp = ddp_class(MLP())
    train(ddp)

    def run(m: nn.Module, x: torch.Tensor) -> None:
        if m is not ddp:
            m(x).pow(2).mean().backward()
        else:
            with ddp.no_sync():
                ddp(x).pow(2).mean().backward()
            ddp.module = nn.Sequential(ddp.module)
        m(3 * x).pow(2).mean().backward()

    module = ddp.module
    for param in module.parameters():
        param.grad = None
    expected = copy.deepcopy(module)
    x = torch.randn(5, 8)
    run(expected, x)
    run(ddp, x)
    for param, local in zip(module.parameters(), expected.parameters(), strict=True):
        dist.all_reduce(local.grad)
        assert torch.allclose(param.grad, local.grad / world_size, atol=1e-6), "not the mean over ranks"


@row(
    "ddp.module replaced on one rank only",
    "models that differ: an error on every rank",
    errors={r: ["out of step", "rank 0", "rank 1", "compares the module"] for r in range(2)},
    kills=True,
)
def replaced_on_one_rank(ddp_class: Any, rank: int, world_size: int) -> None:
    ddp = ddp_class(MLP())
    train(ddp)
    if rank == 1:
        ddp.module = nn.Sequential(ddp.module)
    for _ in range(3):
        ddp(torch.randn(5, 8)).sum().backward()


@row("ignored parameters, and ddp.module wrapped in a container", "they stay local, the others are reduced")
def ignored(ddp_class: Any, rank: int, world_size: int) -> None:
    model = MLP()
    TorchDDP._set_params_and_buffers_to_ignore_for_model(model, ["head.bias"])
    ddp = ddp_class(model)
    ddp(torch.ones(5, 8) * (rank + 1)).sum().backward()
    ddp.module = nn.Sequential(model)
    ddp.zero_grad()
    ddp(torch.ones(5, 8) * (rank + 1)).mul(rank + 1).sum().backward()
    assert torch.equal(model.head.bias.grad, torch.full_like(model.head.bias, 5.0 * (rank + 1))), "it was reduced"
    expected = model.head.weight.grad.clone()
    dist.all_reduce(expected)
    assert torch.allclose(model.head.weight.grad, expected / world_size), "the others were not reduced"
