"""Many steps of one small model on a rank, with what may pile up: buffers, a comm hook, the control plane."""

import datetime
import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.models import ConvNet

from unified_ddp.hooks import AllReduce
from unified_ddp.torch import DistributedDataParallel, HookState, shared_hook

MIB = 1024 * 1024


def resident() -> int:
    """Bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def held() -> dict[str, int]:
    """What the operating system counts of this process."""
    return {
        "file descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "Python threads": threading.active_count(),
    }


def soak(rank: int, world_size: int, steps: int, warm_up: int) -> dict[str, Any]:
    """Returns resident memory and seconds a step, in windows of steps, and what is held before and after.

    A first wrapper is made and dropped, so that what a process keeps once for all is there before.
    """
    train(2, 2)
    before = held()
    memory, seconds = train(steps, warm_up)
    deadline = time.monotonic() + 10
    while (after := held()) != before and time.monotonic() < deadline:
        time.sleep(0.1)  # threads and sockets of a group that is gone end by and by
    return {"memory": memory, "seconds": seconds, "before": before, "after": after}


def train(steps: int, warm_up: int) -> tuple[list[int], list[float]]:
    """Returns resident memory and the median step in seconds after each tenth of the steps that follow the warm-up."""
    group = dist.new_group(timeout=datetime.timedelta(minutes=2))
    try:
        return windows(group, steps, warm_up)
    finally:
        gc.collect()
        dist.destroy_process_group(group)


def windows(group: dist.ProcessGroup, steps: int, warm_up: int) -> tuple[list[int], list[float]]:
    """What `train` returns; the wrapper is gone when this has returned."""
    ddp = DistributedDataParallel(ConvNet(), process_group=group, bucket_cap_mb=0.001, check_replicas_every=100)
    ddp.register_comm_hook(HookState(AllReduce(), group), shared_hook)
    ddp.register_post_reduction_hook(lambda name, param: None)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)

    def step() -> float:
        start = time.perf_counter()
        optimizer.zero_grad()
        with ddp.no_sync():
            ddp(torch.randn(4, 64)).pow(2).mean().backward()
        ddp(torch.randn(4, 64)).pow(2).mean().backward()
        optimizer.step()
        return time.perf_counter() - start

    for _ in range(warm_up):
        step()
    memory, seconds = [resident()], []
    for _ in range(10):
        window = sorted(step() for _ in range((steps - warm_up) // 10))
        seconds.append(window[len(window) // 2] if window else 0.0)
        gc.collect()
        memory.append(resident())
    return memory, seconds
