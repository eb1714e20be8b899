"""One backward on several ranks through the real layer: processes over gloo, or over NCCL where each has a GPU."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from unified_ddp.equivalence.results import BucketTime
from unified_ddp.equivalence.side import Arrays, Reduction
from unified_ddp.equivalence.spawn import run_ranks
from unified_ddp.torch.ddp import DistributedDataParallel
from unified_ddp.torch.equivalence.tensors import load, to_numpy
from unified_ddp.torch.equivalence.timeline import record_timeline


@dataclass(frozen=True)
class _Job:
    side: Any
    values: Arrays
    shards: Sequence[Any]
    dtype: str
    device: str
    step: Callable[..., Any] | None


@dataclass(frozen=True)
class _Rank:
    reduced: Arrays
    local: Arrays
    buckets: tuple[tuple[str, ...], ...]
    timeline: tuple[BucketTime, ...]


def reduce_on_ranks(
    side: Any,
    values: Arrays,
    shards: Sequence[Any],
    dtype: str,
    step: Callable[..., Any] | None = None,
) -> Reduction:
    """See `Side.reduce`. The plan is the layer's own, in the order in which gradients become ready.

    Args:
        side: the model and its loss.
        values: its weights.
        shards: one a rank.
        dtype: of the run.
        step: called as step(wrapped, batch) in place of loss and backward.
    """
    on_gpus = any(p.is_cuda for p in side.model.parameters()) and torch.cuda.device_count() >= len(shards)
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if Path("/sys/class/net/lo").exists() else {}
    threads = max(1, (os.cpu_count() or 1) // len(shards))
    ranks: list[_Rank] = run_ranks(
        "unified_ddp.torch.equivalence.reduction:run_rank",
        _Job(side, values, shards, dtype, "cuda" if on_gpus else "cpu", step),
        len(shards),
        environment={"OMP_NUM_THREADS": str(threads), **loopback},
        modules=side.modules() | {getattr(step, "__module__", "")},
    )
    times = tuple(time for rank in ranks for time in rank.timeline)
    return Reduction(tuple(r.reduced for r in ranks), tuple(r.local for r in ranks), ranks[0].buckets, times)


def run_rank(job: _Job, rank: int, ranks: int, directory: Path) -> _Rank:
    """Runs in one rank's process: a plain backward, then one through the layer, from equal weights."""
    side, shard = job.side, job.shards[rank]
    if job.device == "cuda":
        torch.cuda.set_device(rank)
    side.move(torch.device(job.device))
    dist.init_process_group(
        "nccl" if job.device == "cuda" else "gloo",
        init_method=f"file://{directory / 'rendezvous'}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=120),
    )
    plain = side.evaluate(job.values, shard, job.dtype)
    module = side.module(job.values, job.dtype, fresh=True)
    unused = _any_rank(bool(plain.unused), job.device)
    wrapped = side.wrap(module, unused=unused)
    names = {name for name, param in module.named_parameters() if param.requires_grad}
    batch = side.batch(shard, job.dtype)
    buffers = {info.name: job.values[info.name] for info in side.tensors() if info.buffer}
    for _ in range(2):  # buckets are rebuilt once, after the first backward, in the order in which gradients came
        load(module, buffers)
        module.zero_grad()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            if job.step is None:
                side.call(wrapped, batch)[0].backward()
            else:
                job.step(wrapped, batch)
    reduced = {name: _whole(param) for name, param in module.named_parameters() if name in names}
    buckets = _buckets(wrapped)
    times = record_timeline(side, job.values, shard, job.dtype, unused=unused) if job.device == "cpu" else ()
    dist.barrier()
    dist.destroy_process_group()
    return _Rank(reduced, plain.gradients, buckets, times)


def _whole(param: torch.Tensor) -> np.ndarray:
    """The gradient, gathered if it is sharded (a DTensor); zeros if none came."""
    grad = torch.zeros_like(param) if param.grad is None else param.grad
    gather = getattr(grad, "full_tensor", None)
    return to_numpy(gather() if gather else grad.to_dense() if grad.is_sparse else grad)


def _any_rank(flag: bool, device: str) -> bool:
    tensor = torch.tensor([float(flag)], device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return bool(tensor.item())


def _buckets(wrapped: Any) -> tuple[tuple[str, ...], ...]:
    """Names by bucket; () for a layer that is not ours and does not say."""
    if not isinstance(wrapped, DistributedDataParallel):
        return ()
    plan = wrapped.plan
    return tuple(tuple(plan.params[i].name for i in bucket.params) for bucket in plan.buckets)
