"""What is done to a module after it was wrapped."""

import contextlib
import copy
import warnings
from typing import Any

import torch
import torch.distributed as dist
from support.models import MLP
from support.oracle import assert_equals_oracle, check_step, oracle
from torch import nn

from faults.table import row

VIEWS = ({}, {"gradient_as_bucket_view": True})


def loss(out: torch.Tensor) -> torch.Tensor:
    return out.pow(2).mean()


def train(ddp: Any, steps: int = 2, dtype: torch.dtype = torch.float32) -> None:
    for _ in range(steps):
        check_step(ddp, lambda m, x=torch.randn(5, 8, dtype=dtype): loss(m(x)).backward())


def same_on_all_ranks(module: nn.Module) -> bool:
    for tensor in module.state_dict().values():
        every = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(every, tensor.contiguous())
        if not all(torch.equal(every[0], other) for other in every):
            return False
    return True


@row("a layer frozen after wrapping, and unfrozen again", "no gradient while frozen", variants=VIEWS)
def frozen_for_a_while(ddp_class: Any, rank: int, world_size: int, **options: Any) -> None:
    ddp = ddp_class(MLP(), **options)
    train(ddp)
    for _ in range(2):
        ddp.module.layers[0].requires_grad_(False)
        train(ddp)
        ddp.module.layers[0].requires_grad_(True)
        train(ddp)


@row("a layer frozen at wrapping and unfrozen later", "its gradient like any other", variants=VIEWS)
def unfrozen(ddp_class: Any, rank: int, world_size: int, **options: Any) -> None:
    model = MLP()
    model.layers[0].requires_grad_(False)
    ddp = ddp_class(model, **options)
    train(ddp)
    model.layers[0].requires_grad_(True)
    train(ddp, 3)


@row("`.grad` replaced by the user between two backward passes", "adds to the new one", variants=VIEWS)
def replaced_gradients(ddp_class: Any, rank: int, world_size: int, **options: Any) -> None:
    ddp = ddp_class(MLP(), **options)
    train(ddp)
    x = torch.randn(5, 8)
    for p in ddp.module.parameters():
        p.grad = torch.full_like(p, float(rank))
    expected = oracle(ddp.module, lambda m: loss(m(x)).backward())
    loss(ddp(x)).backward()
    assert_equals_oracle(ddp.module, expected)
    train(ddp)


@row("load_state_dict(assign=True) after wrapping", "gradients on the new parameters", variants=VIEWS)
def assigned(ddp_class: Any, rank: int, world_size: int, **options: Any) -> None:
    ddp = ddp_class(MLP(), **options)
    train(ddp)
    state = {n: nn.Parameter(t * 0.5) for n, t in ddp.module.state_dict().items()}
    ddp.module.load_state_dict(state, assign=True)
    train(ddp, 3)
    assert all(p.grad is not None for p in ddp.module.parameters())


@row("`.double()` after wrapping", "float64 gradients", variants=VIEWS)
def cast(ddp_class: Any, rank: int, world_size: int, **options: Any) -> None:
    ddp = ddp_class(MLP(), **options)
    train(ddp)
    ddp.double()
    train(ddp, 3, torch.float64)
    assert all(p.grad.dtype == torch.float64 for p in ddp.module.parameters())


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.extra = MLP(), nn.ModuleList()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        for layer in self.extra:
            x = layer(x)
        return x


@row("a layer added after wrapping, initialised differently on each rank", "rank 0's values, as at wrapping")
def added(ddp_class: Any, rank: int, world_size: int) -> None:
    ddp = ddp_class(Growing())
    train(ddp)
    torch.manual_seed(rank)
    ddp.module.extra.append(nn.Linear(4, 4))
    ddp(torch.randn(5, 8))
    assert same_on_all_ranks(ddp.module), "the ranks' parameters differ"
    train(ddp, 3)
    assert same_on_all_ranks(ddp.module), "the ranks' parameters differ"


@row(
    "other layers added on each rank after wrapping",
    "models that differ: an error on every rank",
    errors={0: ["extra.0.weight", "shape", "rank 1"], 1: ["extra.0.weight", "shape", "rank 1"]},
)
def added_differently(ddp_class: Any, rank: int, world_size: int) -> None:
    ddp = ddp_class(Growing())
    train(ddp)
    ddp.module.extra.append(nn.Linear(4, 4 + rank))
    out = ddp(torch.randn(5, 8))
    loss(out).backward()


@row("a layer replaced by a smaller one", "gradients on the new one")
def replaced_layer(ddp_class: Any, rank: int, world_size: int) -> None:
    ddp = ddp_class(MLP())
    train(ddp)
    torch.manual_seed(rank)
    ddp.module.head = nn.Linear(40, 2)
    ddp(torch.randn(5, 8))
    train(ddp, 3)
    assert same_on_all_ranks(ddp.module), "the ranks' parameters differ"


@row("functional_call with other parameters", "gradients on those, and none on the module's")
def functional(ddp_class: Any, rank: int, world_size: int) -> None:
    ddp = ddp_class(MLP())
    train(ddp)
    others = {n: nn.Parameter(p.detach().clone()) for n, p in ddp.named_parameters()}
    ddp.zero_grad()
    loss(torch.func.functional_call(ddp, others, (torch.randn(5, 8),))).backward()
    assert all(p.grad is None for p in ddp.parameters())
    assert all(p.grad is not None for p in others.values())
    train(ddp)


@row("backward through wrapper.module in a synchronising step", "local gradients: a warning, once")
def around_the_wrapper(ddp_class: Any, rank: int, world_size: int) -> None:
    ddp = ddp_class(MLP())
    train(ddp)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ddp.no_sync():
            loss(ddp.module(torch.randn(5, 8))).backward()
        assert not caught, "a warning under no_sync"
        for _ in range(3):
            loss(ddp.module(torch.randn(5, 8))).backward()
    texts = [str(w.message) for w in caught if "not reduced" in str(w.message)]
    assert len(texts) == 1, f"warnings: {texts}"
    train(ddp)


@row("a weight's penalty in a backward pass of its own, after a reduced one", "adds it; local here: a warning")
def penalty_apart(ddp_class: Any, rank: int, world_size: int) -> None:
    ddp = ddp_class(MLP())
    train(ddp)
    loss(ddp(torch.randn(5, 8))).backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (ddp.module.head.weight.pow(2).sum() * (rank + 1)).backward()
    assert any("not reduced" in str(w.message) for w in caught), "no warning"


@row("a deep copy of the wrapper", "trains like the original", variants=VIEWS)
def copied(ddp_class: Any, rank: int, world_size: int, **options: Any) -> None:
    ddp = ddp_class(MLP(), **options)
    train(ddp)
    train(copy.deepcopy(ddp), 3)
    train(ddp)


@row("parameters removed after wrapping", "gradients on the others", variants=({"how": "del"}, {"how": "None"}))
def removed(ddp_class: Any, rank: int, world_size: int, how: str) -> None:
    ddp = ddp_class(MLP())
    train(ddp)
    if how == "del":
        del ddp.module.layers[1].bias
        ddp.module.layers[1].register_parameter("bias", None)
    else:
        ddp.module.layers[1].bias = None
    train(ddp, 3)


@row("a change that differs between ranks, caught, mended, and gone on with", "trains as after a change made alike")
def mended(ddp_class: Any, rank: int, world_size: int) -> None:
    ddp = ddp_class(MLP())
    train(ddp)
    ddp.module.head = nn.Linear(40, 2 + rank)
    with contextlib.suppress(RuntimeError):
        ddp(torch.randn(5, 8))
    ddp.module.head = nn.Linear(40, 2)
    ddp(torch.randn(5, 8))
    train(ddp, 3)
