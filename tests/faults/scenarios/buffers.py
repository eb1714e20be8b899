"""Buffers, which each forward takes from rank 0."""

from typing import Any

import torch
from support.models import ConvNet
from support.oracle import assert_equals_oracle, check_step, oracle
from torch import nn

from faults.table import row


class Scaled(nn.Module):
    """Multiplies by a buffer, which the graph saves, and which every forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))
        self.scale: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


def loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.pow(2).mean() + b.pow(2).mean()


OPTIONS = ({}, {"find_unused_parameters": True})


@row("two forwards, then backward: a sync overwrites a buffer that the first graph saved", "the value saved counts")
def saved(ddp_class: Any, rank: int, world_size: int) -> None:
    ddp = ddp_class(Scaled())
    layer = ddp.module.layer
    for first, second in ((2.0, 3.0), (5.0, 7.0)):
        x = torch.randn(5, 8)
        ddp.zero_grad()
        expected = oracle(layer, lambda m, x=x, a=first, b=second: loss(m(x) * a, m(x) * b).backward())
        if rank == 0:
            ddp.module.scale.fill_(first)
        out = ddp(x)
        if rank == 0:
            ddp.module.scale = torch.full((8,), second)  # the graph of `out` keeps the old one
        loss(out, ddp(x)).backward()
        assert_equals_oracle(layer, expected)


@row("batch norm, two forwards and then backward", "as without the sync", variants=OPTIONS)
def batch_norm_twice(ddp_class: Any, rank: int, world_size: int, **options: Any) -> None:
    ddp = ddp_class(ConvNet(), **options)

    def run(m: nn.Module, x: torch.Tensor) -> None:
        loss(m(x), m(2 * x)).backward()

    for _ in range(3):
        check_step(ddp, lambda m, x=torch.randn(5, 64): run(m, x))


@row("a buffer replaced by the module in its forward", "the new one is used, and synced")
def replaced(ddp_class: Any, rank: int, world_size: int) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("count", torch.zeros(()))
            self.count: torch.Tensor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count = self.count + 1
            return self.layer(x) * self.count

    ddp = ddp_class(Counting())
    for step in range(4):
        check_step(ddp, lambda m, x=torch.randn(5, 8): m(x).pow(2).mean().backward())
        if rank == 1:
            ddp.module.count = torch.tensor(float(step + 1))
