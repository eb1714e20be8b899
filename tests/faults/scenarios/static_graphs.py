"""static_graph=True."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from support.models import MLP, TwoHeads
from support.oracle import assert_equals_oracle, check_step, oracle
from support.outputs import OUTPUTS
from torch import nn

from faults.table import row


def loss(out: torch.Tensor) -> torch.Tensor:
    return out.pow(2).mean()


@row("static_graph with the first step under no_sync", "accumulates, then reduces all (pytorch#143580)")
def first_under_no_sync(ddp_class: Any, rank: int, world_size: int) -> None:
    ddp = ddp_class(MLP(), static_graph=True)
    x = torch.randn(5, 8)
    for _ in range(3):
        ddp.zero_grad()
        expected = oracle(ddp.module, lambda m: [loss(m(x)).backward(), loss(m(2 * x)).backward()])
        with ddp.no_sync():
            loss(ddp(x)).backward()
        loss(ddp(2 * x)).backward()
        assert_equals_oracle(ddp.module, expected)


KINDS = ("dataclass", "OrderedDict", "dict subclass", "user class")


class Returning(nn.Module):
    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.body, self.make = MLP(), make

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(self.body(x))


@row("static_graph, kind of output", "reaches through it (pytorch#124666)", variants=[{"kind": k} for k in KINDS])
def outputs(ddp_class: Any, rank: int, world_size: int, kind: str) -> None:
    make, value = OUTPUTS[kind]
    ddp = ddp_class(Returning(make), static_graph=True)
    for _ in range(3):
        check_step(ddp, lambda m, x=torch.randn(5, 8): loss(value(m(x))).backward())
        assert type(ddp(torch.randn(5, 8))) is type(make(torch.ones(1)))


@row(
    "static_graph after deepcopy", "a copy trains as the original", variants=({"steps_before": 0}, {"steps_before": 2})
)
def copied(ddp_class: Any, rank: int, world_size: int, steps_before: int) -> None:
    ddp = ddp_class(MLP(), static_graph=True)
    for _ in range(steps_before):
        check_step(ddp, lambda m, x=torch.randn(5, 8): loss(m(x)).backward())
    other = copy.deepcopy(ddp)
    for each in (other, ddp):
        for _ in range(3):
            check_step(each, lambda m, x=torch.randn(5, 8): loss(m(x)).backward())


@row(
    "static_graph, a later iteration uses more than the first",
    "the graph is not static: an error in that iteration",
    errors={0: ["changed in this iteration", "right.weight"], 1: ["changed in this iteration", "right.weight"]},
)
def uses_more(ddp_class: Any, rank: int, world_size: int) -> None:
    ddp = ddp_class(TwoHeads(), static_graph=True)
    for _ in range(2):
        check_step(ddp, lambda m, x=torch.randn(5, 8): loss(m(x)["l"]).backward())
    out = ddp(torch.randn(5, 8))
    (loss(out["l"]) + loss(out["r"])).backward()


@row(
    "static_graph, a later iteration uses less than the first",
    "the graph is not static: an error before the next step",
    errors={0: ["static_graph", "right.weight"], 1: ["static_graph", "right.weight"]},
)
def uses_less(ddp_class: Any, rank: int, world_size: int) -> None:
    ddp = ddp_class(TwoHeads(), static_graph=True)
    for heads in ("lr", "lr", "l", "lr"):
        out = ddp(torch.randn(5, 8), heads)
        sum(loss(v) for v in out.values()).backward()
