"""A rank that is killed, stopped or slowed down from outside: the others name it, in time."""

import contextlib
import datetime
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import MLP, ConvNet
from support.world import World

from unified_ddp import ReductionError
from unified_ddp.torch import DistributedDataParallel

TIMEOUT = 6.0
WORK = 0.5  # seconds of a processor that the victim needs where others wait for it
FOREVER = 1e6


def step(rank: int, world_size: int, where: str, victim: int, work: float, group_timeout: float, ready: str) -> Any:
    """Two ordinary steps, then one in which the victim says that it is `ready` and works on."""
    DistributedDataParallel(MLP())(torch.randn(4, 8)).sum().backward()  # what is loaded once takes long, not in step
    dist.barrier()
    group = dist.new_group(timeout=datetime.timedelta(seconds=group_timeout))
    forward = where == "forward with buffers"
    model = ConvNet() if forward else MLP()
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.0001)

    def train() -> None:
        ddp(torch.randn(4, 64 if forward else 8)).pow(2).mean().backward()

    for _ in range(2):
        train()

    def busy(_grad: Any = None) -> None:
        Path(ready).touch()
        end = time.process_time() + work
        while time.process_time() < end:
            pass

    if rank == victim and not forward:
        next(ddp.module.parameters()).register_hook(busy)  # the last gradient: other buckets are in flight
    start = time.monotonic()
    try:
        if rank == victim and forward:
            busy()
        train()
    except ReductionError as error:
        return str(error), time.monotonic() - start
    return "", time.monotonic() - start


def after(ready: Path, act: Callable[[], None]) -> None:
    deadline = time.monotonic() + 150
    while not ready.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    act()


@contextlib.contextmanager
def slowed(ready: Path, victim: int) -> Iterator[Callable[[list[int]], None]]:
    """Lets the victim run a tenth of the time, from when it is ready."""
    over = threading.Event()
    threads: list[threading.Thread] = []

    def slow(pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            while not over.is_set():
                os.kill(pid, signal.SIGSTOP)
                time.sleep(0.09)
                os.kill(pid, signal.SIGCONT)
                time.sleep(0.01)

    def start(pids: list[int]) -> None:
        threads.append(threading.Thread(target=lambda: after(ready, lambda: slow(pids[victim]))))
        threads[0].start()

    try:
        yield start
    finally:
        over.set()
        for thread in threads:
            thread.join(60)


@pytest.fixture
def ranks() -> Iterator[World]:
    world = World(3)
    yield world
    world.stop()


def assert_named(results: list[Any], victim: int) -> None:
    for rank, result in enumerate(results):
        if rank == victim:
            continue
        assert result.error is None, result.error
        text, seconds = result.value
        assert f"and rank {victim} did not arrive there" in text
        assert seconds < TIMEOUT + 10


WHERE = [("backward pass", 2), ("forward with buffers", 0)]


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize(("where", "victim"), WHERE)
def test_killed_or_stopped(ranks: World, tmp_path: Path, how: str, where: str, victim: int) -> None:
    ready = tmp_path / "ready"

    def act(pids: list[int]) -> None:
        after(ready, lambda: os.kill(pids[victim], signal.Signals[how]))
        if how == "SIGSTOP":  # ended when the others must have said all that they have to say
            time.sleep(TIMEOUT + 12)
            os.kill(pids[victim], signal.SIGKILL)

    results = ranks.collect(
        step,
        timeout=100,
        meanwhile=act,
        where=where,
        victim=victim,
        work=FOREVER,
        group_timeout=TIMEOUT,
        ready=str(ready),
    )
    assert_named(results, victim)


@pytest.mark.parametrize("in_time", [True, False])
@pytest.mark.parametrize(("where", "victim"), WHERE)
def test_slowed(ranks: World, tmp_path: Path, in_time: bool, where: str, victim: int) -> None:
    """To a tenth: no error if that is within the group's timeout, else the rank is named."""
    ready = tmp_path / "ready"
    with slowed(ready, victim) as slow:
        results = ranks.collect(
            step,
            timeout=100,
            meanwhile=slow,
            where=where,
            victim=victim,
            work=WORK if in_time else 10 * WORK,
            group_timeout=90.0 if in_time else TIMEOUT,
            ready=str(ready),
        )
    if in_time:
        assert [(r.error, r.value and r.value[0]) for r in results] == [(None, "")] * 3
    else:
        assert_named(results, victim)
