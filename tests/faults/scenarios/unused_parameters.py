"""Parameters that a rank leaves out of the loss."""

import datetime
from typing import Any

import torch
import torch.distributed as dist
from support.models import TwoHeads
from support.oracle import assert_equals_oracle, check_step, oracle
from torch import nn

from faults.table import row


def loss(out: dict[str, torch.Tensor]) -> torch.Tensor:
    return sum((v.pow(2).mean() for v in out.values()), torch.zeros(()))


@row(
    "unused on every rank without the flag",
    "None; nothing said that it may be unused (pytorch#22049)",
    errors={r: ["right.weight", "find_unused_parameters=True", "for rank 0", "for rank 1"] for r in range(2)},
)
def everywhere(ddp_class: Any, rank: int, world_size: int) -> None:
    ddp = ddp_class(TwoHeads())
    for _ in range(3):
        check_step(ddp, lambda m, x=torch.randn(5, 8): loss(m(x, "l")).backward())


@row(
    "unused on one rank without the flag",
    "the mean with zero; never gradients that differ (pytorch#112152, pytorch#68297)",
    errors={
        0: ["rank 1", "right.weight"],
        1: ["right.weight", "find_unused_parameters=True", "Other ranks had a gradient for"],
    },
)
def on_one_rank(ddp_class: Any, rank: int, world_size: int) -> None:
    group = dist.new_group(timeout=datetime.timedelta(seconds=4))
    ddp = ddp_class(TwoHeads(), process_group=group)
    for step in range(3):
        x = torch.randn(5, 8)
        ddp.zero_grad()
        heads = "l" if rank == 1 and step == 1 else "lr"
        expected = oracle(ddp.module, lambda m, x=x, heads=heads: loss(m(x, heads)).backward()) if step < 2 else None
        loss(ddp(x, heads)).backward()
        if expected is not None:
            assert_equals_oracle(ddp.module, expected)


@row(
    "several backward passes that cover the parameters between them", "adds them", variants=({}, {"static_graph": True})
)
def covered_by_several(ddp_class: Any, rank: int, world_size: int, **options: Any) -> None:
    ddp = ddp_class(TwoHeads(), **options)

    def run(m: nn.Module, x: torch.Tensor) -> None:
        out = m(x)
        out["l"].pow(2).mean().backward(retain_graph=True)
        out["r"].pow(2).mean().backward()

    for _ in range(3):
        check_step(ddp, lambda m, x=torch.randn(5, 8): run(m, x))


@row("find_unused_parameters, other parameters unused on each rank", "the mean with zero")
def declared(ddp_class: Any, rank: int, world_size: int) -> None:
    ddp = ddp_class(TwoHeads(), find_unused_parameters=True)
    for step in range(4):
        heads = ("l", "r", "lr", "l")[(step + rank) % 4]
        check_step(ddp, lambda m, x=torch.randn(5, 8), h=heads: loss(m(x, h)).backward())


@row("skip_all_reduce_unused_params with unequal unused sets", "the mean with zero", timeout=40)
def skipped(ddp_class: Any, rank: int, world_size: int) -> None:
    group = dist.new_group(timeout=datetime.timedelta(seconds=8))
    ddp = ddp_class(
        TwoHeads(),
        process_group=group,
        find_unused_parameters=True,
        skip_all_reduce_unused_params=True,
        bucket_cap_mb=0.0001,
    )
    for step in range(4):
        heads = ("l", "r", "lr", "l")[(step + rank) % 4]
        check_step(ddp, lambda m, x=torch.randn(5, 8), h=heads: loss(m(x, h)).backward())
