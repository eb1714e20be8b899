"""Graphs that reach parameters more than once, not at all, or past the wrapper's output."""

from typing import Any

import torch
import torch.nn.functional as F
from support.models import MLP, Checkpointed, TiedEmbedding, TwoHeads
from support.oracle import check_step
from torch import nn
from torch.utils.checkpoint import checkpoint

from faults.table import row

OPTIONS = ({}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True})
STATIC = (*OPTIONS, {"static_graph": True})


def loss(out: torch.Tensor) -> torch.Tensor:
    return out.pow(2).mean()


@row("one layer under two reentrant checkpoints", "adds both contributions (pytorch#24005)", variants=OPTIONS)
def two_checkpoints(ddp_class: Any, rank: int, world_size: int, **options: Any) -> None:
    ddp = ddp_class(Checkpointed(True), **options)
    for _ in range(3):
        x = torch.randn(5, 8, requires_grad=True)
        check_step(ddp, lambda m, x=x: loss(m(x)).backward())


class UnusedUnderCheckpoint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right, self.last = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        x = self.first(x)
        x = checkpoint(lambda y: torch.tanh((self.left if left else self.right)(y)), x, use_reentrant=True)
        return checkpoint(lambda y: torch.sin(self.last(y)), x, use_reentrant=True)


@row(
    "unused layers under reentrant checkpoints, others on each rank",
    "unused ones get nothing (pytorch#46166)",
    variants=({"find_unused_parameters": True}, {"find_unused_parameters": True, "gradient_as_bucket_view": True}),
)
def unused_under_checkpoints(ddp_class: Any, rank: int, world_size: int, **options: Any) -> None:
    ddp = ddp_class(UnusedUnderCheckpoint(), **options)
    for step in range(4):
        x = torch.randn(5, 8, requires_grad=True)
        check_step(ddp, lambda m, x=x, left=(rank + step) % 2 == 0: loss(m(x, left)).backward())


@row("the loss uses a weight outside the forward", "adds that contribution", variants=STATIC)
def weight_outside(ddp_class: Any, rank: int, world_size: int, **options: Any) -> None:
    ddp = ddp_class(MLP(), **options)

    def run(m: nn.Module, x: torch.Tensor) -> None:
        inner = m.module if isinstance(m, ddp_class) else m
        (loss(m(x)) + inner.head.weight.pow(2).sum() * (rank + 1)).backward()

    for _ in range(3):
        check_step(ddp, lambda m, x=torch.randn(5, 8): run(m, x))


@row("forward A, forward B, backward A, backward B", "adds both (pytorch#47260)", variants=STATIC)
def interleaved(ddp_class: Any, rank: int, world_size: int, **options: Any) -> None:
    ddp = ddp_class(MLP(), **options)

    def run(m: nn.Module, x: torch.Tensor) -> None:
        a, b = loss(m(x)), loss(m(2 * x))
        a.backward()
        b.backward()

    for _ in range(3):
        check_step(ddp, lambda m, x=torch.randn(5, 8): run(m, x))


@row("one forward, two backwards with retain_graph", "adds both (pytorch#80832)", variants=STATIC)
def retained(ddp_class: Any, rank: int, world_size: int, **options: Any) -> None:
    ddp = ddp_class(MLP(), **options)

    def run(m: nn.Module, x: torch.Tensor) -> None:
        out = m(x)
        loss(out).backward(retain_graph=True)
        out.sum().backward()

    for _ in range(3):
        check_step(ddp, lambda m, x=torch.randn(5, 8): run(m, x))


@row("backward(inputs=...) with some of the parameters", "leaves gradients on those only", variants=OPTIONS[1:])
def chosen_inputs(ddp_class: Any, rank: int, world_size: int, **options: Any) -> None:
    options.setdefault("find_unused_parameters", True)
    ddp = ddp_class(MLP(), **options)
    for _ in range(3):
        check_step(ddp, lambda m, x=torch.randn(5, 8): loss(m(x)).backward(inputs=list(m.parameters())[-2:]))


class TwoEmbeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Embedding(10, 4, sparse=True), nn.Embedding(10, 4, sparse=True)
        self.head = nn.Linear(4, 2)

    def forward(self, tokens: torch.Tensor, second: bool) -> torch.Tensor:
        h = self.a(tokens)
        return self.head(h + self.b(tokens) if second else h)


@row("a sparse embedding that only some ranks use", "counts as zero where unused (pytorch#80496)")
def unused_sparse(ddp_class: Any, rank: int, world_size: int) -> None:
    ddp = ddp_class(TwoEmbeddings(), find_unused_parameters=True)
    for step in range(4):
        tokens = torch.randint(0, 10, (6,))
        second = step == 1 or (step == 2 and rank == 0)
        check_step(ddp, lambda m, t=tokens, s=second: loss(m(t, s)).backward())


class SparseAndDense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4, sparse=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embedding(tokens)
        return F.linear(h, self.embedding.weight)


@row("one embedding used sparsely and densely", "adds a dense gradient to a sparse one")
def sparse_and_dense(ddp_class: Any, rank: int, world_size: int) -> None:
    ddp = ddp_class(SparseAndDense())
    for _ in range(3):
        check_step(ddp, lambda m, t=torch.randint(0, 10, (6,)): loss(m(t)).backward())


@row("a tied embedding", "adds both uses", variants=STATIC)
def tied(ddp_class: Any, rank: int, world_size: int, **options: Any) -> None:
    ddp = ddp_class(TiedEmbedding(), **options)
    for _ in range(3):
        check_step(ddp, lambda m, t=torch.randint(0, 20, (6,)): loss(m(t)).backward())


def penalty(m: nn.Module, x: torch.Tensor, alone: bool) -> None:
    x = x.clone().requires_grad_()
    out = m(x)
    slope = torch.autograd.grad(out.sum(), x, create_graph=True)[0]
    (slope.pow(2).sum() + (0 if alone else loss(out))).backward()


@row("a gradient penalty with the loss", "second derivatives (pytorch#47562)", variants=STATIC)
def penalty_with_loss(ddp_class: Any, rank: int, world_size: int, **options: Any) -> None:
    ddp = ddp_class(MLP(), **options)
    for _ in range(3):
        check_step(ddp, lambda m, x=torch.randn(5, 8): penalty(m, x, False))


@row(
    "a gradient penalty alone, which leaves a bias without a gradient",
    "None on that bias (pytorch#47562)",
    variants=({"find_unused_parameters": True}, {"static_graph": True}),
)
def penalty_alone(ddp_class: Any, rank: int, world_size: int, **options: Any) -> None:
    ddp = ddp_class(MLP(), **options)
    for _ in range(3):
        check_step(ddp, lambda m, x=torch.randn(5, 8): penalty(m, x, True))


@row("an output that the loss never uses", "no gradient for its layer (pytorch#97030)", variants=STATIC[1::2])
def unused_output(ddp_class: Any, rank: int, world_size: int, **options: Any) -> None:
    ddp = ddp_class(TwoHeads(), **options)
    for _ in range(3):
        check_step(ddp, lambda m, x=torch.randn(5, 8): loss(m(x)["l"]).backward())


@row(
    "torch.autograd.grad on one rank only, between forward and backward",
    "leaves every .grad alone",
    variants=(*OPTIONS, {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}),
)
def grad_on_one_rank(ddp_class: Any, rank: int, world_size: int, **options: Any) -> None:
    ddp = ddp_class(MLP(), **options)

    def run(m: nn.Module, x: torch.Tensor) -> None:
        out = m(x)
        if rank == 0:
            torch.autograd.grad(out.sum(), next(iter(m.parameters())), retain_graph=True)
            torch.autograd.grad(out.sum(), x, retain_graph=True)
        loss(out).backward()

    for _ in range(3):
        check_step(ddp, lambda m, x=torch.randn(5, 8, requires_grad=True): run(m, x))


@row("torch.autograd.grad after no_sync", "leaves what was accumulated alone", variants=OPTIONS)
def grad_after_no_sync(ddp_class: Any, rank: int, world_size: int, **options: Any) -> None:
    ddp = ddp_class(MLP(), **options)
    for _ in range(2):
        check_step(ddp, lambda m, x=torch.randn(5, 8): loss(m(x)).backward())
    ddp.zero_grad()
    with ddp.no_sync():
        loss(ddp(torch.randn(5, 8))).backward()
    before = [p.grad.clone() for p in ddp.parameters()]
    x = torch.randn(5, 8, requires_grad=True)
    torch.autograd.grad(ddp(x).sum(), x)
    assert all(torch.equal(p.grad, b) for p, b in zip(ddp.parameters(), before, strict=True)), "it changed .grad"


@row(
    "a post-accumulate hook, registered after wrapping, that scales gradients",
    "scales what each rank adds to the mean",
    variants=({}, {"bucket_cap_mb": 0.001}, {"gradient_as_bucket_view": True}),
)
def scaling_hook(ddp_class: Any, rank: int, world_size: int, **options: Any) -> None:
    ddp = ddp_class(MLP(300, 2), **options)  # with gradients large enough to be packed at once

    def scale(p: torch.Tensor) -> None:
        p.grad.mul_(rank + 1)

    def run(m: nn.Module, x: torch.Tensor) -> None:
        handles = [p.register_post_accumulate_grad_hook(scale) for p in m.parameters()]
        loss(m(x)).backward()
        for handle in handles:
            handle.remove()

    for _ in range(3):
        check_step(ddp, lambda m, x=torch.randn(5, 8): run(m, x))


@row("torch.func.grad through the wrapper in the second iteration", "later steps are as any other")
def through_functorch(ddp_class: Any, rank: int, world_size: int) -> None:
    ddp = ddp_class(MLP())
    check_step(ddp, lambda m, x=torch.randn(5, 8): loss(m(x)).backward())
    torch.func.grad(lambda x: ddp(x).sum())(torch.randn(5, 8))
    for _ in range(3):
        check_step(ddp, lambda m, x=torch.randn(5, 8): loss(m(x)).backward())
