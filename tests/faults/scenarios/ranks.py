"""Ranks that stall, die, or run other steps than the rest."""

import contextlib
import datetime
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from support.models import MLP, ConvNet
from torch import nn

from faults.table import row

BUCKET = ["bucket 0", "head.bias"]


def loss(out: torch.Tensor) -> torch.Tensor:
    return out.pow(2).mean()


def wrapped(ddp_class: Any, model: nn.Module | None = None, **options: Any) -> Any:
    group = dist.new_group(timeout=datetime.timedelta(seconds=4))
    ddp = ddp_class(model or MLP(), process_group=group, **options)
    for _ in range(2):
        loss(ddp(torch.randn(4, 64 if isinstance(model, ConvNet) else 8))).backward()
    return ddp


def step(ddp: Any) -> None:
    loss(ddp(torch.randn(4, 8))).backward()


@row(
    "a rank stalls in its backward",
    "the others' error names it within the timeout and a few seconds",
    ranks=3,
    errors={0: ["rank 2", *BUCKET], 1: ["rank 2", *BUCKET]},
    timeout=30,
)
def stalls(ddp_class: Any, rank: int, world_size: int) -> None:
    ddp = wrapped(ddp_class)
    out = ddp(torch.randn(4, 8))
    if rank == 2:
        time.sleep(14)
    loss(out).backward()


@row(
    "a rank dies in its backward",
    "the others' error names it",
    ranks=3,
    errors={0: ["rank 2", *BUCKET], 1: ["rank 2", *BUCKET]},
    kills=True,
    timeout=30,
)
def dies(ddp_class: Any, rank: int, world_size: int) -> None:
    ddp = wrapped(ddp_class)
    out = ddp(torch.randn(4, 8))
    if rank == 2:
        os._exit(3)
    loss(out).backward()


@row(
    "a rank raises in its forward and ends",
    "the others' error names it",
    errors={0: ["rank 1", *BUCKET]},
    kills=True,
    timeout=30,
)
def raises(ddp_class: Any, rank: int, world_size: int) -> None:
    ddp = wrapped(ddp_class)
    if rank == 1:
        os._exit(1)
    step(ddp)


@row(
    "a rank skips a backward pass, of a model with buffers",
    "an error on both ranks, before buffers meet gradients",
    errors={r: ["backward pass 3", "on rank 0", "broadcasts buffers", "on rank 1"] for r in range(2)},
    timeout=30,
)
def skips_backward(ddp_class: Any, rank: int, world_size: int) -> None:
    ddp = wrapped(ddp_class, ConvNet())
    for skip in (rank == 1, False):
        out = ddp(torch.randn(4, 64))
        if not skip:
            loss(out).backward()


@row(
    "a rank skips its last step",
    "the other's error names it",
    errors={0: ["rank 1", *BUCKET]},
    timeout=30,
)
def skips_last(ddp_class: Any, rank: int, world_size: int) -> None:
    ddp = wrapped(ddp_class)
    if rank == 0:
        step(ddp)


@row(
    "ranks disagree on no_sync",
    "the synchronising rank's error names the other",
    errors={0: ["rank 1", *BUCKET]},
    timeout=30,
    variants=({}, {"find_unused_parameters": True}),
)
def disagree(ddp_class: Any, rank: int, world_size: int, **options: Any) -> None:
    ddp = wrapped(ddp_class, **options)
    with ddp.no_sync() if rank == 1 else contextlib.nullcontext():
        step(ddp)


@row(
    "ranks disagree on no_sync, TORCH_DISTRIBUTED_DEBUG=DETAIL",
    "an error in that forward, on both",
    errors={r: ["no_sync", "synchronising on rank 0", "under no_sync on rank 1"] for r in range(2)},
    timeout=30,
)
def disagree_detail(ddp_class: Any, rank: int, world_size: int) -> None:
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    try:
        disagree(ddp_class, rank, world_size)
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


@row(
    "a rank constructs no wrapper",
    "the other's error names it",
    errors={0: ["rank 1", "construction"]},
    timeout=30,
)
def not_constructed(ddp_class: Any, rank: int, world_size: int) -> None:
    group = dist.new_group(timeout=datetime.timedelta(seconds=4))
    if rank == 0:
        ddp_class(MLP(), process_group=group)
