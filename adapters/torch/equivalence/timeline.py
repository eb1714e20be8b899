"""When each bucket of one rank was ready and when it was reduced, on CPUs, where the host's clock tells."""

import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from unified_ddp.equivalence.results import BucketTime
from unified_ddp.equivalence.side import Arrays
from unified_ddp.torch.ddp import DistributedDataParallel

_BACKWARDS = 3
"""Buckets are rebuilt after the first, the second warms up, and the last is told."""


@dataclass
class _Clock:
    began: float = 0.0
    ready: dict[int, float] = field(default_factory=dict)
    reduced: dict[int, float] = field(default_factory=dict)


def record_timeline(side: Any, values: Arrays, shard: Any, dtype: str, *, unused: bool) -> tuple[BucketTime, ...]:
    """Runs backward passes of their own, with an all-reduce that looks at the clock; every rank has to.

    Args:
        side: the model and its loss.
        values: its weights.
        shard: this rank's.
        dtype: of the run.
        unused: some rank's backward does not reach all parameters.

    Returns:
        One entry a bucket; () if the side's layer is not ours.
    """
    wrapped = side.wrap(side.module(values, dtype, fresh=True), unused=unused)
    if not isinstance(wrapped, DistributedDataParallel):
        return ()
    clock = _Clock()
    wrapped.register_comm_hook(clock, _timed_all_reduce)
    for _ in range(_BACKWARDS):
        wrapped.zero_grad()
        loss, _ = side.call(wrapped, side.batch(shard, dtype))
        dist.barrier()
        clock.began = time.perf_counter()
        loss.backward()
    rank = dist.get_rank()
    return tuple(
        BucketTime("torch", rank, bucket, ready - clock.began, clock.reduced[bucket] - clock.began)
        for bucket, ready in sorted(clock.ready.items())
    )


def _timed_all_reduce(clock: _Clock, bucket: dist.GradBucket) -> "torch.futures.Future[torch.Tensor]":
    index = bucket.index()
    clock.ready[index] = time.perf_counter()
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)

    def done(future: "torch.futures.Future[Any]") -> torch.Tensor:
        clock.reduced[index] = time.perf_counter()
        return future.value()[0]

    return work.get_future().then(done)
