"""What a module does to itself while its forward runs."""

import contextlib
import datetime
from typing import Any

import torch
import torch.distributed as dist
from support.oracle import assert_equals_oracle, check_step, local_copy, oracle
from torch import nn

from faults.table import row

OPTIONS = (
    {},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"reduction": "sum"},
    {"broadcast_buffers": False},
)


def loss(out: torch.Tensor) -> torch.Tensor:
    return out.pow(2).mean()


def train(ddp: Any, steps: int = 3) -> None:
    for _ in range(steps):
        check_step(ddp, lambda m, x=torch.randn(5, 8): loss(m(x)).backward())


class Changing(nn.Module):
    """Calls `change(self)` in its forward."""

    def __init__(self, change: Any = lambda m: None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(()))
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(self)
        x = torch.relu(self.first(x))
        third = getattr(self, "third", None)
        return self.second(x) if third is None else third(self.second(x))


def unfreeze(m: nn.Module) -> None:
    m.first.requires_grad_(True)


def switch(m: nn.Module) -> None:
    """Trains the one layer, then the other, as adapters are switched from batch to batch."""
    m.turn = getattr(m, "turn", 0) + 1
    m.first.requires_grad_(m.turn % 2 == 0)
    m.second.requires_grad_(m.turn % 2 == 1)


def make_third(m: nn.Module) -> None:
    if not hasattr(m, "third"):
        with torch.random.fork_rng():
            torch.manual_seed(7)
            m.third = nn.Linear(8, 4)


def replace(m: nn.Module) -> None:
    m.second.weight = nn.Parameter(m.second.weight.detach() * 0.5)


def grow(m: nn.Module) -> None:
    rows = torch.full((1, 8), 0.25)
    m.second = nn.Linear(8, m.second.out_features + 1)
    with torch.no_grad():
        m.second.weight.copy_(rows.expand_as(m.second.weight))
        m.second.bias.zero_()


def make(change: Any) -> nn.Module:
    model = Changing(change)
    model.first.requires_grad_(change not in (unfreeze, switch))
    return model


@row("a forward unfreezes a layer", "its mean gradient in that very step", variants=(*OPTIONS[:4], OPTIONS[5]))
def unfreezes(ddp_class: Any, rank: int, world_size: int, **options: Any) -> None:
    train(ddp_class(make(unfreeze), **options))


@row("a forward switches which layer is trained", "the mean gradient of the one that is", variants=OPTIONS[:2])
def switches(ddp_class: Any, rank: int, world_size: int, **options: Any) -> None:
    train(ddp_class(make(switch), find_unused_parameters=True, **options), 6)


@row("a forward makes a layer at its first use", "its mean gradient in that very step", variants=OPTIONS[:4])
def makes(ddp_class: Any, rank: int, world_size: int, **options: Any) -> None:
    train(ddp_class(make(make_third), **options))


@row("a forward replaces a parameter", "the mean gradient of the new one, in every step", variants=OPTIONS[:4])
def replaces(ddp_class: Any, rank: int, world_size: int, **options: Any) -> None:
    train(ddp_class(make(replace), **options))


@row("a forward grows a layer", "the mean gradient of the new one, in every step", variants=OPTIONS[:3])
def grows(ddp_class: Any, rank: int, world_size: int, **options: Any) -> None:
    train(ddp_class(make(grow), **options))


@row(
    "a forward makes a layer of its own on each rank",
    "an error on all ranks that names its parameter, before an optimizer can step",
    errors={0: ["third.weight"], 1: ["third.weight"]},
)
def differ(ddp_class: Any, rank: int, world_size: int) -> None:
    def own(m: nn.Module) -> None:
        if not hasattr(m, "third"):
            m.third = nn.Linear(8, 4)  # from each rank's own generator

    ddp = ddp_class(Changing(own))
    loss(ddp(torch.randn(5, 8))).backward()


@row(
    "a forward unfreezes a layer on one rank only",
    "an error on all ranks that says which",
    errors={r: ["out of step", "changed inside it", "on rank 1"] for r in range(2)},
)
def on_one(ddp_class: Any, rank: int, world_size: int) -> None:
    group = dist.new_group(timeout=datetime.timedelta(seconds=10))
    model = make(unfreeze)
    model.change = unfreeze if rank == 1 else (lambda m: None)
    ddp = ddp_class(model, process_group=group)
    loss(ddp(torch.randn(5, 8))).backward()


@row("a layer is made under no_sync", "the mean of both gradients", variants=OPTIONS[:3])
def under_no_sync(ddp_class: Any, rank: int, world_size: int, **options: Any) -> None:
    def accumulate(m: nn.Module, batches: list[torch.Tensor]) -> None:
        for i, x in enumerate(batches):
            with m.no_sync() if hasattr(m, "no_sync") and i == 0 else contextlib.nullcontext():
                loss(m(x)).backward()

    ddp = ddp_class(make(make_third), **options)
    for _ in range(2):
        check_step(ddp, lambda m, b=[torch.randn(5, 8) for _ in range(2)]: accumulate(m, b))


@row("a forward makes a layer while a graph under no_sync waits", "its gradient stays local until the next reduction")
def graph_waits(ddp_class: Any, rank: int, world_size: int) -> None:
    ddp = ddp_class(make(make_third))
    x = torch.randn(5, 8)
    local = local_copy(ddp.module)
    make_third(local)
    loss(local(x)).backward()
    with ddp.no_sync():
        make_third(ddp.module)
        first = loss(ddp(x))
    ddp.module.change = replace
    second = loss(ddp(x))
    first.backward()
    names = {name for name, _ in local.named_parameters()} - {"second.weight"}
    for name in names:
        torch.testing.assert_close(ddp.module.get_parameter(name).grad, local.get_parameter(name).grad)
    expected = oracle(ddp.module, lambda m: loss(m.third(m.second(torch.relu(m.first(x))))).backward())
    second.backward()
    assert_equals_oracle(ddp.module, expected)
