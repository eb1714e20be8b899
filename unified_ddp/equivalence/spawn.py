"""Ranks in processes of their own: a side goes there by cloudpickle, which takes lambdas and a script's classes."""

import contextlib
import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from unified_ddp.equivalence.errors import EquivalenceError

_POLL_SECONDS = 0.02
_LOG_LINES = 30
_CHILD = "from unified_ddp.equivalence.spawn import child; child()"


def run_ranks(
    target: str,
    payload: Any,
    ranks: int,
    *,
    environment: Mapping[str, str],
    modules: Iterable[str] = (),
    timeout: float = 600.0,
) -> list[Any]:
    """Runs `target(payload, rank, ranks, directory)` in one new process a rank and returns what each returned.

    Args:
        target: "package.module:function".
        payload: anything that cloudpickle takes.
        ranks: number of processes.
        environment: added to this process's.
        modules: names of modules whose classes and functions the payload holds. Those that a new process could not
            import, as a test file or a notebook, travel by value.
        timeout: seconds until the run is given up.

    Raises:
        EquivalenceError: the payload cannot be pickled, a rank failed (with the end of what it said), or time ran out.
            Every process has ended when it is raised.
    """
    with tempfile.TemporaryDirectory(prefix="unified-ddp-ranks-") as name:
        directory = Path(name)
        (directory / "payload").write_bytes(_dumped(payload, modules))
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                processes.append(_start(target, directory, rank, ranks, environment))
            _wait(processes, directory, timeout)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        return [pickle.loads((directory / f"result{rank}").read_bytes()) for rank in range(ranks)]


def child() -> None:
    """The new process's main function."""
    target, name, rank, ranks = sys.argv[1:]
    module, _, function = target.partition(":")
    directory = Path(name)
    payload = pickle.loads((directory / "payload").read_bytes())
    result = getattr(importlib.import_module(module), function)(payload, int(rank), int(ranks), directory)
    (directory / f"result{rank}").write_bytes(pickle.dumps(result))


def _dumped(payload: Any, modules: Iterable[str]) -> bytes:
    try:
        import cloudpickle
    except ModuleNotFoundError as error:
        raise EquivalenceError("ranks in processes of their own need cloudpickle: pip install cloudpickle") from error
    with contextlib.ExitStack() as stack:
        for module in {sys.modules[name] for name in modules if name in sys.modules and name != "__main__"}:
            if not _importable(module):
                stack.enter_context(_by_value(cloudpickle, module))
        try:
            return cloudpickle.dumps(payload)
        except Exception as error:
            raise EquivalenceError(
                f"a side cannot be sent to the processes of the ranks: {type(error).__name__}: {error}. Define its "
                "model and its loss at the top of a module"
            ) from error


@contextlib.contextmanager
def _by_value(cloudpickle: Any, module: Any) -> Iterator[None]:
    known = module.__name__ in cloudpickle.list_registry_pickle_by_value()
    if not known:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        if not known:
            cloudpickle.unregister_pickle_by_value(module)


def _importable(module: Any) -> bool:
    """Says whether a new process with this one's path finds the module's file by its name."""
    file = getattr(module, "__file__", None)
    if file is None:
        return module.__name__ in sys.builtin_module_names
    below = Path(*module.__name__.split("."))
    for entry in sys.path:
        for found in (Path(entry, below).with_suffix(".py"), Path(entry, below, "__init__.py")):
            if found.exists() and found.samefile(file):
                return True
    return not str(file).endswith(".py")


def _start(
    target: str, directory: Path, rank: int, ranks: int, environment: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    path = os.pathsep.join(entry for entry in sys.path if entry)
    with (directory / f"log{rank}").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-c", _CHILD, target, str(directory), str(rank), str(ranks)],
            env={**os.environ, "PYTHONPATH": path, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def _wait(processes: "list[subprocess.Popen[bytes]]", directory: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while any(process.poll() is None for process in processes):
        failed = [rank for rank, process in enumerate(processes) if process.poll()]
        if failed:
            raise EquivalenceError(_failure(processes, directory, failed[0]))
        if time.monotonic() > deadline:
            slow = [rank for rank, process in enumerate(processes) if process.poll() is None]
            raise EquivalenceError(f"ranks {slow} were not done after {timeout:g} seconds and were ended")
        time.sleep(_POLL_SECONDS)
    failed = [rank for rank, process in enumerate(processes) if process.returncode]
    if failed:
        raise EquivalenceError(_failure(processes, directory, failed[0]))


def _failure(processes: "list[subprocess.Popen[bytes]]", directory: Path, rank: int) -> str:
    lines = (directory / f"log{rank}").read_text(errors="replace").splitlines()[-_LOG_LINES:]
    said = "\n".join(f"    {line}" for line in lines) or "    (nothing)"
    return f"rank {rank} ended with status {processes[rank].returncode}; the end of what it said:\n{said}"
