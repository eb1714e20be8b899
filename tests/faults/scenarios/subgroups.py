"""A process group of some of the ranks: errors call them by their numbers among all processes."""

import datetime
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from faults.table import row

MEMBERS = (1, 2)
BOTH = ["on rank 1", "on rank 2"]


def loss(out: torch.Tensor) -> torch.Tensor:
    return out.pow(2).mean()


def train(ddp: Any, steps: int = 1) -> None:
    for _ in range(steps):
        loss(ddp(torch.randn(4, 3))).backward()


def wrapped(ddp_class: Any, group: Any, module: nn.Module | None = None, **options: Any) -> Any:
    return ddp_class(module or nn.Linear(3, 3), process_group=group, **options)


def other_model(ddp_class: Any, group: Any, rank: int) -> None:
    train(wrapped(ddp_class, group, nn.Linear(3, 3 if rank == 1 else 4)))


def other_option(ddp_class: Any, group: Any, rank: int) -> None:
    train(wrapped(ddp_class, group, static_graph=rank == 2))


def other_hook(ddp_class: Any, group: Any, rank: int) -> None:
    ddp = wrapped(ddp_class, group)
    if rank == 2:
        ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
    train(ddp)


def other_values(ddp_class: Any, group: Any, rank: int) -> None:
    ddp = wrapped(ddp_class, group)
    train(ddp)
    with torch.no_grad():
        ddp.module.weight[0] += rank
    ddp.check_replicas()


def local_steps(ddp_class: Any, group: Any, rank: int) -> None:
    ddp = wrapped(ddp_class, group, nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    train(ddp, 2)
    with ddp.no_sync(enabled=rank == 2):
        train(ddp)
    train(ddp)


def without_weight(ddp_class: Any, group: Any, rank: int) -> None:
    ddp = wrapped(ddp_class, group, reduction="weighted_mean")
    if rank == 1:
        ddp.set_weight(1.0)
    train(ddp)


def changed_gradients(ddp_class: Any, group: Any, rank: int) -> None:
    ddp = wrapped(ddp_class, group, check_gradients_every=1)
    if rank == 2:
        storage = ddp.reducer.backend.storages[0]
        unpack = storage.unpack
        storage.unpack = lambda reduced, *rest: unpack(reduced.mul_(2.0), *rest)
    train(ddp)


def left_out(ddp_class: Any, group: Any, rank: int) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.other = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    ddp = wrapped(ddp_class, group, Half())
    train(ddp, 2)


def stalls(ddp_class: Any, group: Any, rank: int) -> None:
    ddp = wrapped(ddp_class, group)
    train(ddp)
    if rank == 2:
        time.sleep(12)
        return
    train(ddp)


def raises(ddp_class: Any, group: Any, rank: int) -> None:
    def hook(state: Any, bucket: Any) -> Any:
        if rank == 2:
            raise KeyError("mine")
        return default_hooks.allreduce_hook(group, bucket)

    ddp = wrapped(ddp_class, group)
    ddp.register_comm_hook(None, hook)
    train(ddp)


PROGRAMS: dict[str, tuple[Callable[[Any, Any, int], None], dict[int, list[str]]]] = {
    "other models": (other_model, {1: BOTH, 2: BOTH}),
    "other options": (other_option, {1: BOTH, 2: BOTH}),
    "other comm hooks": (other_hook, {1: BOTH, 2: BOTH}),
    "replicas that differ": (other_values, {1: BOTH, 2: BOTH}),
    "no_sync on one rank": (local_steps, {1: [*BOTH, "rank 1: ", "rank 2: "], 2: [*BOTH, "rank 1: ", "rank 2: "]}),
    "a missing weight": (without_weight, {1: ["on rank 2"], 2: ["on rank 2"]}),
    "gradients that something changes": (changed_gradients, {1: ["on rank 2: "], 2: ["on rank 2: "]}),
    "unused parameters": (left_out, {1: ["for rank 1: ", "for rank 2: "], 2: ["for rank 1: ", "for rank 2: "]}),
    "a rank that stalls": (stalls, {1: ["failed on rank 1, and rank 2 did not arrive"]}),
    "a rank that raises": (raises, {1: ["rank 2 did not arrive"], 2: ["mine"]}),
}


def enter(what: str, program: Callable[[Any, Any, int], None], errors: dict[int, list[str]]) -> None:
    @row(f"a group of ranks 1 and 2, {what}", "an error that gives global ranks", ranks=3, errors=errors, kills=True)
    def on_subgroup(ddp_class: Any, rank: int, world_size: int) -> None:
        group = dist.new_group(list(MEMBERS), timeout=datetime.timedelta(seconds=4))
        if rank in MEMBERS:
            program(ddp_class, group, rank)


for name, (of, said) in PROGRAMS.items():
    enter(name, of, said)
