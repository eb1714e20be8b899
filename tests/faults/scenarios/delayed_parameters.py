"""delay_all_reduce_named_params and param_to_hook_all_reduce."""

import copy
from typing import Any

import torch
from support.models import MLP, Mixed
from support.oracle import assert_equals_oracle, check_step, oracle
from torch import nn

from faults.table import row


def loss(out: torch.Tensor) -> torch.Tensor:
    return out.pow(2).mean()


def delaying(
    ddp_class: Any, trigger: str, model: nn.Module | None = None, which: str = "layers.0", **options: Any
) -> Any:
    model = model or MLP()
    named = [(n, p) for n, p in model.named_parameters() if n.startswith(which)]
    return ddp_class(
        model, delay_all_reduce_named_params=named, param_to_hook_all_reduce=model.get_parameter(trigger), **options
    )


@row(
    "delayed parameters",
    "their gradients like all others",
    variants=({"trigger": "head.weight"}, {"trigger": "layers.0.weight"}, {"trigger": "layers.1.weight"}),
)
def triggers(ddp_class: Any, rank: int, world_size: int, trigger: str) -> None:
    ddp = delaying(ddp_class, trigger)
    for _ in range(3):
        check_step(ddp, lambda m, x=torch.randn(5, 8): loss(m(x)).backward())


class Skipping(MLP):
    def forward(self, x: torch.Tensor, use: bool = True) -> torch.Tensor:
        for layer in self.layers[: None if use else -1]:
            x = torch.tanh(layer(x))
        return self.head(x)


@row("delayed parameters whose trigger is unused", "their gradients like all others")
def unused_trigger(ddp_class: Any, rank: int, world_size: int) -> None:
    ddp = delaying(ddp_class, "layers.2.weight", Skipping(), find_unused_parameters=True)
    for step in range(4):
        check_step(ddp, lambda m, x=torch.randn(5, 8), use=step % 2 == 0: loss(m(x, use)).backward())


@row("delayed parameters under no_sync", "local until the next synchronising pass")
def accumulated(ddp_class: Any, rank: int, world_size: int) -> None:
    ddp = delaying(ddp_class, "head.weight")
    for _ in range(3):
        x = torch.randn(5, 8)
        ddp.zero_grad()
        first = copy.deepcopy(ddp.module)
        loss(first(x)).backward()
        expected = oracle(ddp.module, lambda m, x=x: [loss(m(x)).backward(), loss(m(2 * x)).backward()])
        with ddp.no_sync():
            loss(ddp(x)).backward()
        for local, own in zip(first.parameters(), ddp.module.parameters(), strict=True):
            assert torch.equal(local.grad, own.grad), "reduced under no_sync"
        loss(ddp(2 * x)).backward()
        assert_equals_oracle(ddp.module, expected)


@row("delayed parameters of several dtypes", "their gradients like all others")
def dtypes(ddp_class: Any, rank: int, world_size: int) -> None:
    ddp = delaying(ddp_class, "d", Mixed(), which="b")
    for _ in range(3):
        check_step(ddp, lambda m, x=torch.randn(5, 8): loss(m(x)).backward())


@row("delayed parameters after deepcopy", "the copy's gradients, and its own")
def copied(ddp_class: Any, rank: int, world_size: int) -> None:
    ddp = delaying(ddp_class, "head.weight")
    check_step(ddp, lambda m, x=torch.randn(5, 8): loss(m(x)).backward())
    other = copy.deepcopy(ddp)
    for each in (other, ddp):
        for _ in range(2):
            check_step(each, lambda m, x=torch.randn(5, 8): loss(m(x)).backward())
