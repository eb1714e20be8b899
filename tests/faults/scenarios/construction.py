"""Ranks that are constructed differently."""

import datetime
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from faults.table import row


def swapped(rank: int) -> nn.Module:
    a, b = ("a", nn.Linear(4, 4)), ("b", nn.Linear(4, 4))
    module = nn.Module()
    for name, layer in (a, b) if rank == 0 else (b, a):
        module.add_module(name, layer)
    return module


def with_buffer(rank: int) -> nn.Module:
    module = nn.Linear(4, 4)
    if rank == 0:
        module.register_buffer("statistics", torch.zeros(3))
    return module


def partly_frozen(rank: int) -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].requires_grad_(rank == 0)
    return module


BUILD: dict[str, tuple[Callable[[int], nn.Module], Callable[[int], dict[str, Any]], str]] = {
    "shapes": (lambda r: nn.Linear(4, 4 + r), lambda r: {}, "weight"),
    "dtypes": (lambda r: nn.Linear(4, 4, dtype=(torch.float32, torch.float64)[r]), lambda r: {}, "weight"),
    "order": (swapped, lambda r: {}, "a.weight"),
    "count": (lambda r: nn.Sequential(*(nn.Linear(4, 4) for _ in range(2 + r))), lambda r: {}, "2.weight"),
    "frozen parameters": (partly_frozen, lambda r: {}, "1.weight"),
    "buffers": (with_buffer, lambda r: {}, "statistics"),
    "find_unused_parameters": (
        lambda r: nn.Linear(4, 4),
        lambda r: {"find_unused_parameters": r == 1},
        "find_unused_parameters",
    ),
    "static_graph": (lambda r: nn.Linear(4, 4), lambda r: {"static_graph": r == 1}, "static_graph"),
    "bucket caps": (lambda r: nn.Linear(4, 4), lambda r: {"bucket_cap_mb": 1 + r}, "bucket caps"),
}
WORDS = {k: v[2] for k, v in BUILD.items()}


def enter(what: str) -> None:
    words = [WORDS[what], "rank 0", "rank 1"]

    @row(f"other {what} on each rank", "an error on every rank", errors={0: words, 1: words}, timeout=40)
    def different(ddp_class: Any, rank: int, world_size: int) -> None:
        make, options, _ = BUILD[what]
        group = dist.new_group(timeout=datetime.timedelta(seconds=4))
        ddp = ddp_class(make(rank), process_group=group, **options(rank))
        if isinstance(ddp.module, nn.Linear | nn.Sequential):
            for _ in range(3):
                ddp(torch.ones(2, 4)).sum().backward()


for each in BUILD:
    enter(each)
