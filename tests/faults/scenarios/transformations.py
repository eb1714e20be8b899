"""Transformations of torch.func through the wrapper."""

from collections.abc import Callable
from typing import Any

import torch
from support.oracle import check_step
from torch import nn
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap

from faults.table import row


class Scaled(nn.Module):
    """Has a buffer, which each rank changes between forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.register_buffer("scale", torch.ones(3))
        self.scale: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * self.scale).tanh()


def total(params: dict[str, torch.Tensor], m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return functional_call(m, params, (x,)).pow(2).sum()


def params_of(m: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in m.named_parameters()}


def state_of(m: nn.Module) -> dict[str, torch.Tensor]:
    return params_of(m) | {name: torch.ones_like(b) for name, b in m.named_buffers()}


def for_each_sample(m: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    return vmap(grad(total), in_dims=(None, None, 0))(params_of(m), m, x)


TRANSFORMED: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "grad": lambda m, x: grad(lambda y: m(y).sum())(x),
    "vmap": lambda m, x: vmap(m)(x),
    "jvp": lambda m, x: jvp(m, (x,), (torch.ones_like(x),)),
    "vjp": lambda m, x: vjp(m, x)[1](torch.ones(len(x), 3)),
    "jacrev": lambda m, x: jacrev(m)(x),
    "grad of functional_call": lambda m, x: grad(total)(params_of(m), m, x),
    "grad of functional_call, buffers too": lambda m, x: grad(total)(state_of(m), m, x),
    "vmap of grad of functional_call": for_each_sample,
    "jvp of grad": lambda m, x: jvp(grad(lambda y: m(y).sum()), (x,), (torch.ones_like(x),)),
}


def flat(result: Any) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(result)
    return sorted((t.detach() for t in leaves), key=lambda t: t.numel())


@row(
    "torch.func through the wrapper of a module with buffers",
    "what it gives of the module itself, with rank 0's buffers; later steps are as any other",
    variants=[{"what": what, **o} for what in TRANSFORMED for o in ({}, {"find_unused_parameters": True})],
)
def transformed(ddp_class: Any, rank: int, world_size: int, what: str, **options: Any) -> None:
    ddp = ddp_class(Scaled(), **options)
    for step in range(3):
        x = torch.randn(5, 8)
        ddp.module.scale.fill_(step + 2.0 + rank)
        had = flat(TRANSFORMED[what](ddp, x))
        ddp.module.scale.fill_(step + 2.0)
        wanted = flat(TRANSFORMED[what](ddp.module, x))
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(had, wanted, strict=True)), "another result"
        check_step(ddp, lambda m, x=torch.randn(5, 8): m(x).pow(2).mean().backward())


@row(
    "a backward pass through what vmap and jvp give of the wrapper",
    "the mean over ranks",
    variants=({"what": "vmap"}, {"what": "jvp"}),
)
def differentiated(ddp_class: Any, rank: int, world_size: int, what: str) -> None:
    ddp = ddp_class(Scaled())

    def run(m: nn.Module, x: torch.Tensor) -> None:
        out = vmap(m)(x) if what == "vmap" else jvp(m, (x,), (torch.ones_like(x),))[1]
        out.pow(2).mean().backward()

    for _ in range(3):
        check_step(ddp, lambda m, x=torch.randn(5, 8): run(m, x))
