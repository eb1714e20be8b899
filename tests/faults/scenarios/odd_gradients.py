"""Gradients of unusual values, bits and layouts."""

from typing import Any

import torch
from support.oracle import assert_equals_oracle, check_step, mean_over_ranks, oracle
from torch import nn

from faults.table import row

VIEWS = ({}, {"gradient_as_bucket_view": True})
LARGE = 70_000
"""Elements of a parameter that is packed on its own."""


class NegativeZero(torch.autograd.Function):
    """Multiplies by a gradient of -0.0."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        zero = torch.full_like(grad.real if grad.is_complex() else grad, -0.0)
        return torch.complex(zero, zero) if grad.is_complex() else zero


class OnOneRank(nn.Module):
    """Uses one of its parameters if asked to."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.extra = nn.Parameter(torch.ones(size, dtype=dtype))

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        out = self.layer(x).pow(2).mean()
        return out + NegativeZero.apply(self.extra).real.sum() if use else out


@row(
    "a gradient of -0.0 in every element, and none on the other rank",
    "zeros on both",
    variants=[
        *({"size": size, "dtype": "float32", **views} for size in (1, 5, LARGE) for views in VIEWS),
        *({"size": 5, "dtype": dtype} for dtype in ("float64", "bfloat16", "complex64")),
    ],
)
def negative_zero(ddp_class: Any, rank: int, world_size: int, size: int, dtype: str, **options: Any) -> None:
    for used_on in (1, 0):
        ddp = ddp_class(OnOneRank(size, getattr(torch, dtype)), **options)
        ddp(torch.randn(5, 8), rank == used_on).backward()
        grad = ddp.module.extra.grad
        assert grad is not None, "no gradient"
        assert torch.count_nonzero(grad) == 0, "not zero"


@row("a gradient that is missing on all ranks", "None", variants=VIEWS)
def nowhere(ddp_class: Any, rank: int, world_size: int, **options: Any) -> None:
    ddp = ddp_class(OnOneRank(5, torch.float32), **options)
    ddp(torch.randn(5, 8), False).backward()
    assert ddp.module.extra.grad is None, "a gradient that no rank has"


class Conjugate(nn.Module):
    """Its parameter's gradient is a lazy conjugate."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight.conj() * torch.complex(x.sum(), 2 * x.mean())).real.mean()


class Negative(torch.autograd.Function):
    """Has a gradient that is a lazy negative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch._neg_view(grad.contiguous())


class Negated(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (Negative.apply(self.weight) * x.sum()).mean()


@row(
    "gradients that are lazy conjugates or negatives",
    "the mean over ranks",
    variants=[
        {"kind": kind, "size": size, **options}
        for kind in ("Conjugate", "Negated")
        for size in (5, LARGE)
        for options in (*VIEWS, {"static_graph": True}, {"find_unused_parameters": True})
    ],
)
def lazy(ddp_class: Any, rank: int, world_size: int, kind: str, size: int, **options: Any) -> None:
    ddp = ddp_class(globals()[kind](size), **options)

    def twice(m: nn.Module, x: torch.Tensor) -> None:
        m(x).backward()
        m(3 * x).backward()

    for _ in range(3):
        check_step(ddp, lambda m, x=torch.randn(5, 8): m(x).backward())
        check_step(ddp, lambda m, x=torch.randn(5, 8): twice(m, x))


@row("lazy gradients with create_graph", "the mean over ranks", variants=({"kind": "Conjugate"}, {"kind": "Negated"}))
def lazy_in_graph(ddp_class: Any, rank: int, world_size: int, kind: str) -> None:
    ddp = ddp_class(globals()[kind](5))
    for _ in range(3):
        check_step(ddp, lambda m, x=torch.randn(5, 8): m(x).backward(create_graph=True))


ASSIGNED = {
    "transposed": lambda p: torch.randn(p.shape[::-1]).permute(*range(p.dim())[::-1]),
    "with holes": lambda p: torch.randn(*p.shape, 2)[..., 0],
    "of the parameter's own memory": lambda p: p.detach(),
    "negative": lambda p: torch._neg_view(torch.randn(p.shape)),
}
REPEATING = {
    "expanded": lambda size, rank: torch.full((1,), 1.0 + rank).expand(size),
    "expanded in part": lambda size, rank: (torch.arange(size // 2) + rank)[:, None].expand(-1, 2).float(),
    "overlapping": lambda size, rank: (torch.arange(size + 0.0) + rank).as_strided((size // 2, 2), (1, 1)),
}


@row(
    "`.grad` assigned by hand",
    "accumulated to, and the mean over ranks",
    variants=[{"layout": layout, **options} for layout in ASSIGNED for options in (*VIEWS, {"out": LARGE // 8})],
)
def assigned(ddp_class: Any, rank: int, world_size: int, layout: str, out: int = 5, **options: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, out))
    ddp = ddp_class(model, **options)
    for _ in range(2):
        check_step(ddp, lambda m, x=torch.randn(5, 8): m(x).pow(2).mean().backward())
    for param in model.parameters():
        param.grad = ASSIGNED[layout](param)
    x = torch.randn(5, 8)
    expected = oracle(model, lambda m: m(x).pow(2).mean().backward())
    ddp(x).pow(2).mean().backward()
    assert_equals_oracle(model, expected)


@row(
    "`.grad` assigned by hand, elements share memory",
    "the mean over ranks",
    variants=[{"layout": layout, "size": n, **views} for layout in REPEATING for n in (6, LARGE) for views in VIEWS],
)
def repeating(ddp_class: Any, rank: int, world_size: int, layout: str, size: int, **options: Any) -> None:
    module = OnOneRank(size, torch.float32)
    grad = REPEATING[layout](size, rank)
    module.extra = nn.Parameter(torch.ones(grad.shape))
    ddp = ddp_class(module, **options)
    module.extra.grad = grad
    expected = mean_over_ranks(grad, module.extra)
    ddp(torch.randn(5, 8), False).backward()
    assert torch.allclose(module.extra.grad.double(), expected), "not the mean over ranks"


@row("gradients of two parameters swapped while they accumulate", "the mean over ranks", variants=VIEWS)
def swapped(ddp_class: Any, rank: int, world_size: int, **options: Any) -> None:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    ddp = ddp_class(model, **options)
    for _ in range(3):
        check_step(ddp, lambda m, x=torch.randn(5, 8): m(x).pow(2).mean().backward())
    a, b = model[0].weight, model[2].weight
    a.grad, b.grad = b.grad.t(), a.grad
    x = torch.randn(5, 8)
    expected = oracle(model, lambda m: m(x).pow(2).mean().backward())
    ddp(x).pow(2).mean().backward()
    assert_equals_oracle(model, expected)


@row("parameters that are empty, or views with holes", "gradients on all", variants=VIEWS)
def layouts(ddp_class: Any, rank: int, world_size: int, **options: Any) -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.empty = nn.Parameter(torch.empty(0, 8))
            self.holes = nn.Parameter(torch.randn(8, 16)[:, ::2])
            self.scalar = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.holes).pow(2).mean() * self.scalar + (x @ self.empty.t()).sum()

    ddp = ddp_class(Views(), **options)
    for _ in range(3):
        check_step(ddp, lambda m, x=torch.randn(5, 8): m(x).backward())
