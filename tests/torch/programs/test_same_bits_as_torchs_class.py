"""Ours and torch's own class, from the same seeds, give the same bits after 20 steps.

On two ranks a sum has one order. On more, gloo's order for an element depends on its place in the bucket, so that these
tests also hold that our buckets are torch's in every iteration.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import MLP, ConvNet
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from unified_ddp.torch import DistributedDataParallel

STEPS = 20


class Transformer(nn.Module):
    """Token and output embeddings are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 8)
        layer = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.out = nn.Linear(8, 17)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.encoder(self.embedding(tokens)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 12, num_layers=2, batch_first=True)
        self.head = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0])


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "mlp": (MLP, lambda: torch.randn(5, 8)),
    "conv and batch norm": (ConvNet, lambda: torch.randn(5, 64)),
    "transformer, tied": (Transformer, lambda: torch.randint(0, 17, (3, 6))),
    "lstm": (Recurrent, lambda: torch.randn(3, 5, 8)),
    # gradients of 256 KiB and more are packed one by one
    "large parameters": (lambda: MLP(300, 3), lambda: torch.randn(5, 8)),
}
FLAGS = ("gradient_as_bucket_view", "static_graph", "find_unused_parameters")


def train(cls: type, model: str, rank: int, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    make, data = MODELS[model]
    ddp = cls(make(), **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(100 + rank)
    for _ in range(STEPS):
        optimizer.zero_grad()
        ddp(data()).pow(2).mean().backward()
        optimizer.step()
    return {name: tensor.clone() for name, tensor in ddp.state_dict().items()}


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(0.0 if torch.equal(a[n], b[n]) else (a[n].double() - b[n].double()).abs().max().item() for n in a)


def case_bits(rank: int, world_size: int, model: str, combinations: list[dict[str, Any]]) -> None:
    for options in combinations:
        theirs = train(TorchDDP, model, rank, options)
        ours = train(DistributedDataParallel, model, rank, options)
        difference = largest_difference(theirs, ours)
        assert difference == 0, f"{options}: differs by {difference:g}"
        untrained = MODELS[model][0]().state_dict()
        assert any(not torch.equal(ours[f"module.{name}"], untrained[name]) for name in untrained)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_bits_of_training(world: Callable[[int], Any], model: str, ranks: int) -> None:
    combinations: list[dict[str, Any]] = [
        {**dict(zip(FLAGS, flags, strict=True)), "bucket_cap_mb": cap}
        for cap in (None, 0.0005)
        for flags in itertools.product([False, True], repeat=3)
        if cap is None or sum(flags) <= 1
    ]
    world(ranks).run(case_bits, model=model, combinations=combinations, timeout=250)


def case_accumulated(rank: int, world_size: int, options: dict[str, Any]) -> None:
    found = []
    for cls in (TorchDDP, DistributedDataParallel):
        torch.manual_seed(3)
        ddp = cls(MLP(), **options)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        torch.manual_seed(100 + rank)
        for _ in range(STEPS):
            optimizer.zero_grad()
            with ddp.no_sync():
                ddp(torch.randn(5, 8)).pow(2).mean().backward()
            ddp(torch.randn(5, 8)).pow(2).mean().backward()
            optimizer.step()
        found.append([p.clone() for p in ddp.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=str)
def test_bits_of_accumulation(world: Callable[[int], Any], options: dict[str, Any]) -> None:
    world(2).run(case_accumulated, options=options)
