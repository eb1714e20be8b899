"""Comm hooks of all kinds of callables, and what runs on CPUs."""

import copy
import datetime
import functools
import os
from typing import Any

import torch
import torch.distributed as dist
from support.models import MLP
from support.oracle import check_step
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel.distributed import _MixedPrecision

from faults.table import row


def loss(out: torch.Tensor) -> torch.Tensor:
    return out.pow(2).mean()


def averaged(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda f: f.value()[0])


def scaled(factor: float, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return averaged(state, bucket).then(lambda f: f.value() * factor)


def other_names(process_group: Any, grad_bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return averaged(process_group, grad_bucket)


class Callable:
    def __call__(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return averaged(state, bucket)


class Method:
    def hook(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return averaged(state, bucket)


HOOKS: dict[str, Any] = {
    "a function": averaged,
    "a partial": functools.partial(scaled, 1.0),
    "a callable object": Callable(),
    "a bound method": Method().hook,
    "other argument names": other_names,
    "a lambda": lambda state, bucket: averaged(state, bucket),
}


def train(ddp: Any, k: float | None = None) -> None:
    for _ in range(3):
        check_step(ddp, lambda m, x=torch.randn(5, 8): loss(m(x)).backward(), k)


@row("a comm hook that is", "the mean over ranks", variants=[{"kind": kind} for kind in HOOKS])
def kinds(ddp_class: Any, rank: int, world_size: int, kind: str) -> None:
    ddp = ddp_class(MLP(), bucket_cap_mb=0.001)
    ddp.register_comm_hook(None, HOOKS[kind])
    train(ddp)


@row("a comm hook after deepcopy", "the copy has it too")
def copied(ddp_class: Any, rank: int, world_size: int) -> None:
    ddp = ddp_class(MLP(), bucket_cap_mb=0.001)
    seen: list[int] = []

    def counting(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append(bucket.index())
        return averaged(state, bucket)

    ddp.register_comm_hook(None, counting)
    other = copy.deepcopy(ddp)
    train(other)
    assert seen, "the copy does not call the hook"


@row(
    "a comm hook registered on one rank only",
    "buckets reduced two ways: an error on every rank before the first",
    errors={r: ["comm hook", "fp16_compress_hook", "rank 0", "rank 1"] for r in range(2)},
    kills=True,
)
def on_one_rank(ddp_class: Any, rank: int, world_size: int) -> None:
    ddp = ddp_class(MLP(), process_group=dist.new_group(timeout=datetime.timedelta(seconds=4)))
    if rank == 1:
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    loss(ddp(torch.randn(5, 8))).backward()


@row("a compression hook on CPUs", "the mean over ranks, rounded", variants=({"bits": "bf16"}, {"bits": "fp16"}))
def compressed(ddp_class: Any, rank: int, world_size: int, bits: str) -> None:
    ddp = ddp_class(MLP(), bucket_cap_mb=0.001)
    ddp.register_comm_hook(None, getattr(default_hooks, f"{bits}_compress_hook"))
    train(ddp, 0.02)


def nothing(state: Any, bucket: dist.GradBucket) -> Any:
    return bucket.buffer()


@row(
    "a comm hook that returns no future",
    "an error that says so, a RuntimeError",
    errors={
        r: ["is a RuntimeError", "callback must return a torch.futures.Future object, but got", "nothing", "Tensor"]
        for r in range(2)
    },
)
def no_future(ddp_class: Any, rank: int, world_size: int) -> None:
    ddp = ddp_class(MLP())
    ddp.register_comm_hook(None, nothing)
    try:
        loss(ddp(torch.randn(5, 8))).backward()
    except RuntimeError as error:
        raise ValueError(f"is a RuntimeError: {error}") from error


@row("mixed_precision on CPUs", "bfloat16's gradients, float32 parameters", variants=({"passes": 1}, {"passes": 2}))
def mixed(ddp_class: Any, rank: int, world_size: int, passes: int) -> None:
    config = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ddp = ddp_class(MLP(), mixed_precision=config)
    for _ in range(3):
        ddp.zero_grad()
        local = copy.deepcopy(ddp.module).bfloat16()
        local.zero_grad()
        x = torch.randn(5, 8)
        sum(loss(local(x.bfloat16() * (i + 1))) for i in range(passes)).backward()
        sum(loss(ddp(x * (i + 1))) for i in range(passes)).backward()
        for own, p in zip(local.parameters(), ddp.module.parameters(), strict=True):
            mean = own.grad.float()
            dist.all_reduce(mean)
            mean /= world_size
            assert p.dtype == p.grad.dtype == torch.float32
            assert (p.grad - mean).abs().max() <= 0.03 * mean.abs().max() + 1e-6


@row("SyncBatchNorm on CPUs", "batch norm over the batches of all ranks")
def sync_batchnorm(ddp_class: Any, rank: int, world_size: int) -> None:
    torch.manual_seed(5)
    whole = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    ddp = ddp_class(nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(whole)))
    for _ in range(3):
        batches = torch.randn(world_size, 4, 8)
        whole.zero_grad()
        loss(whole(batches.flatten(0, 1))).backward()
        ddp.zero_grad()
        loss(ddp(batches[rank])).backward()
        for mine, expected in zip(ddp.module.parameters(), whole.parameters(), strict=True):
            assert (mine.grad - expected.grad).abs().max() <= 1e-5 * expected.grad.abs().max() + 1e-7


@row("TORCH_DISTRIBUTED_DEBUG", "the same gradients", variants=({"level": "INFO"}, {"level": "DETAIL"}))
def debug_levels(ddp_class: Any, rank: int, world_size: int, level: str) -> None:
    before = dist.get_debug_level()
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = level
    dist.set_debug_level_from_env()
    try:
        ddp = ddp_class(MLP(), process_group=dist.new_group(), find_unused_parameters=True)
        train(ddp)
        with ddp.no_sync():
            loss(ddp(torch.randn(5, 8))).backward()
    finally:
        dist.set_debug_level(before)
