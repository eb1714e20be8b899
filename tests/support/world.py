"""Real ranks for tests: processes with a process group that run many cases, one after the other.

A case is a top-level function `case(rank, world_size, **kwargs)` of a test module; every rank runs it at once. A world
whose case failed or timed out may hold ranks in the middle of a collective, so it is ended and made anew for the next.
"""

import importlib.util
import multiprocessing as mp
import os
import re
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

_START_TIMEOUT = 120.0


@dataclass(frozen=True)
class RankResult:
    value: Any = None
    error: str | None = None
    error_type: str | None = None


class RankError(AssertionError):
    """A case failed on some rank."""


class World:
    def __init__(self, size: int, backend: str = "gloo") -> None:
        self.size = size
        self.backend = backend
        self._processes: list[Any] = []
        self._pipes: list[Any] = []

    def run(self, case: Any, *, timeout: float = 60.0, **kwargs: Any) -> list[Any]:
        """Runs the case on every rank and returns what each returned; raises RankError with every rank's traceback."""
        results = self.collect(case, timeout=timeout, **kwargs)
        errors = [f"--- rank {rank}\n{r.error}" for rank, r in enumerate(results) if r.error]
        if errors:
            raise RankError("\n".join(errors))
        return [r.value for r in results]

    def collect(
        self, case: Any, *, timeout: float = 60.0, meanwhile: Callable[[list[int]], None] | None = None, **kwargs: Any
    ) -> list[RankResult]:
        """Like `run`, but hands errors back by rank. `meanwhile` is called with the ranks' pids while they run."""
        self._start()
        task = _ByPath.dumps((case, kwargs))
        for pipe in self._pipes:
            pipe.send_bytes(task)
        if meanwhile is not None:
            meanwhile([process.pid for process in self._processes])
        deadline = time.monotonic() + timeout
        results = [self._receive(rank, deadline) for rank in range(self.size)]
        if any(r.error for r in results):
            self.stop()
        return results

    def _receive(self, rank: int, deadline: float) -> RankResult:
        pipe = self._pipes[rank]
        try:
            if pipe.poll(max(deadline - time.monotonic(), 0.5)):
                return pipe.recv()
        except (EOFError, OSError):
            return RankResult(error=f"rank {rank} ended with exit code {self._processes[rank].exitcode}")
        return RankResult(error=f"rank {rank} did not finish in time", error_type="TimeoutError")

    def _start(self) -> None:
        if self._processes:
            return
        context = mp.get_context("spawn")
        store = tempfile.mktemp(prefix="unified_ddp_store_")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, self.backend, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        deadline = time.monotonic() + _START_TIMEOUT
        started = [self._receive(rank, deadline) for rank in range(self.size)]
        if any(r.error for r in started):
            self.stop()
            raise RankError("\n".join(str(r.error) for r in started))

    def stop(self) -> None:
        """Ends the ranks, by pid."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join(10)
        self._processes, self._pipes = [], []


def _serve(rank: int, size: int, backend: str, store: str, pipe: Any) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)  # one GPU a rank; gloo ranks share the first
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    pipe.send(RankResult(value="started"))
    while True:
        try:
            task = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            case, kwargs = ForkingPickler.loads(task)
            torch.manual_seed(1000 + rank)
            result = RankResult(value=case(rank, size, **kwargs))
        except BaseException as error:
            result = RankResult(error=traceback.format_exc(), error_type=type(error).__name__)
        try:
            pipe.send(result)
        except (BrokenPipeError, OSError):
            return
        except Exception as error:  # a value that cannot be pickled
            pipe.send(RankResult(error=f"the case's value could not be sent: {error!r}"))


class _ByPath(ForkingPickler):
    """Sends functions and classes of test modules by file: pytest gives these modules names that no rank can import."""

    def reducer_override(self, obj: Any) -> Any:
        """Says how an object is sent; see `pickle.Pickler`."""
        if isinstance(obj, types.FunctionType | type):
            path = getattr(sys.modules.get(obj.__module__), "__file__", None)
            if path is not None and Path(path).name.startswith("test_"):
                return _load, (path, obj.__qualname__)
        return NotImplemented


def _load(path: str, name: str) -> Any:
    """Loads a test module by file, once, and returns what is of this name in it."""
    module_name = "case_" + re.sub(r"\W", "_", path)
    module = sys.modules.get(module_name)
    if module is None:
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
    return found
