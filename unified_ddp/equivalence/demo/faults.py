"""The faults that `--inject` makes: those that strike a process, and those that break one bucket's reduction."""

import os
import sys
import time
from dataclasses import dataclass

import numpy as np

from unified_ddp.equivalence.demo.config import Fault, Side, VerifyConfig
from unified_ddp.hooks import AllReduce, BucketLayout, HookBucket, SharedHook, Sum
from unified_ddp.hooks.collectives import Steps
from unified_ddp.hooks.protocol import State

DIE_STATUS = 86


def break_process(config: VerifyConfig, side: Side, rank: int, step: int) -> None:
    """Ends or stops this process at step 1 (or the only one) if that is the fault to be injected here."""
    fault = config.fault_in(side)
    if fault is None or fault.breaks_reduction or rank != config.rank_at_fault or step != min(1, config.steps - 1):
        return
    print(f"injected fault: {side} rank {rank} will {fault} at step {step}", file=sys.stderr, flush=True)
    if fault is Fault.DIE:
        os._exit(DIE_STATUS)
    while True:
        time.sleep(3600)


def faulty_hook(config: VerifyConfig, side: Side) -> SharedHook | None:
    """Returns the comm hook that breaks the side's reduction, if that is to be injected there."""
    fault = config.fault_in(side)
    if fault is None or not fault.breaks_reduction:
        return None
    return FaultyMean(fault, config.bucket_at_fault, config.rank_at_fault)


@dataclass(frozen=True)
class FaultyMean(SharedHook):
    """The mean of every bucket but one.

    Args:
        fault: what comes of that one instead.
        bucket: its number.
        rank: for a stale rank, the one that contributes its gradients of the step before.
    """

    fault: Fault
    bucket: int
    rank: int

    def init(self, layout: BucketLayout) -> State:
        """Returns what a stale rank needs: its gradients of the step before, of which the first has none."""
        if self.fault is not Fault.STALE_RANK or layout.index != self.bucket:
            return {}
        return {"previous": np.zeros(layout.numel, layout.dtype), "steps": np.zeros((), np.int32)}

    def __call__(self, state: State, bucket: HookBucket, /) -> Steps:
        """Returns the mean of a bucket, or what the fault makes of it."""
        if bucket.layout.index != self.bucket:
            return (yield from AllReduce()(state, bucket))
        if self.fault is Fault.SKIP_BUCKET:
            return bucket.storage, state
        if self.fault is Fault.SUM:
            return (yield Sum(bucket.storage)), state
        ops, rank = bucket.ops, self.rank
        every = yield from bucket.gather(bucket.storage, bucket.layout.dtype)
        stale = ops.where(state["steps"] > 0, state["previous"], every[rank])
        contributed = ops.concat([every[:rank], stale[None], every[rank + 1 :]])
        return contributed.sum(0) / bucket.world_size, {"previous": every[rank], "steps": state["steps"] + 1}
