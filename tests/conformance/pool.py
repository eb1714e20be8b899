"""Workers, each a process that runs one case after the other under a time limit."""

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Plan", "Result", "run_cases"]

_CHUNK = 12
"""Cases that a worker takes at once, all of one suite, so that it imports the suite once."""


@dataclass(frozen=True)
class Plan:
    """What is run, and how.

    Args:
        impl: `module:Class` under test.
        setup: `module:function` called in every process after the substitution, or "".
        timeout: seconds a case.
        jobs: workers at a time.
        retries: how often a case that did not pass is run again.
    """

    impl: str
    setup: str
    timeout: int
    jobs: int
    retries: int


@dataclass
class Result:
    """How one case ended."""

    id: str
    status: str
    seconds: float
    detail: str = ""
    log: str = ""
    retries: int = 0

    @property
    def good(self) -> bool:
        """Whether it passed. An accepted case that is skipped has not."""
        return self.status == "pass"

    @property
    def is_race(self) -> bool:
        """A rank was gone while another still connected, in a case without a collective after its group was made."""
        return self.status == "fail" and "connectFullMesh failed" in self.detail


class WorkerProcess:
    """One worker.

    Raises:
        RuntimeError: it did not start.
    """

    def __init__(self, plan: Plan, mode: str, root: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=root))
        for name in ("barrier", "test_dir"):
            (self.folder / name).mkdir()
        results = self.folder / "results.jsonl"
        results.touch()
        self._results = results.open()
        self._log_path = self.folder / "log"
        with self._log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "conformance.worker", str(results)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=_environment(plan, mode, self.folder),
                cwd=self.folder,
                start_new_session=True,
                text=True,
            )
        started = self._wait(120)
        if started.get("event") != "ready":
            log_text = self._log(0)
            self.end()
            raise RuntimeError(f"a worker did not start:\n{log_text}")

    def run(self, case_id: str, limit: float) -> Result:
        """Runs a case; the worker is of no more use if the status is timeout or error."""
        position = self._log_path.stat().st_size
        began = time.monotonic()
        assert self.process.stdin is not None
        self.process.stdin.write(case_id + "\n")
        self.process.stdin.flush()
        record = self._wait(limit)
        if record["event"] == "end":
            result = Result(case_id, record["status"], record["seconds"], record["detail"])
        else:
            result = Result(case_id, record["event"], round(time.monotonic() - began, 2), record["detail"])
        if not result.good:
            result.log = self._log(position)
        return result

    def _wait(self, limit: float) -> dict:
        deadline = time.monotonic() + limit
        line = ""
        while time.monotonic() < deadline:
            line += self._results.readline()
            if line.endswith("\n"):
                return json.loads(line)
            if self.process.poll() is not None:
                return {"event": "error", "detail": f"the worker ended with exit code {self.process.returncode}"}
            time.sleep(0.05)
        return {"event": "timeout", "detail": f"ended after {limit:g} s"}

    def _log(self, position: int) -> str:
        return self._log_path.read_bytes()[position:].decode(errors="replace")[-4000:]

    def end(self) -> None:
        """Ends the worker and what it started: its own process group, nothing else."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._results.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _environment(plan: Plan, mode: str, folder: Path) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k not in ("MASTER_PORT", "RANK", "TORCH_DISTRIBUTED_DEBUG")}
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    here = str(Path(__file__).parents[1])
    return env | {
        "CONFORMANCE_IMPL": plan.impl,
        "CONFORMANCE_MODE": mode,
        "CONFORMANCE_SETUP": plan.setup,
        "PYTHONPATH": os.pathsep.join(filter(None, [here, env.get("PYTHONPATH")])),
        "BACKEND": "gloo",
        "WORLD_SIZE": "2",
        "TEMP_DIR": str(folder),
        "TMPDIR": str(folder),
        "INIT_METHOD": f"file://{folder}/shared_init_file",
        "MASTER_ADDR": "127.0.0.1",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(max(10, plan.timeout - 10)),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TP_SOCKET_IFNAME": "lo",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def run_cases(plan: Plan, case_ids: Iterable[str], report: Callable[[Result], None]) -> None:
    """Runs the cases and reports each as it ends, one report at a time."""
    by_suite: dict[tuple[str, ...], list[str]] = {}
    for case_id in case_ids:
        by_suite.setdefault(tuple(case_id.split(":")[:2]), []).append(case_id)
    chunks: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    for ids in by_suite.values():
        for start in range(0, len(ids), _CHUNK):
            chunks.put(ids[start : start + _CHUNK])
    lock = threading.Lock()
    with tempfile.TemporaryDirectory(prefix="unified_ddp_conformance_") as root:

        def serve() -> None:
            while True:
                try:
                    chunk = chunks.get_nowait()
                except queue.Empty:
                    return
                for result in _run_chunk(plan, chunk, Path(root)):
                    with lock:
                        report(result)

        threads = [threading.Thread(target=serve) for _ in range(plan.jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _run_chunk(plan: Plan, chunk: list[str], root: Path) -> Iterable[Result]:
    worker: WorkerProcess | None = None
    try:
        for case_id in chunk:
            tries = 0
            while True:
                try:
                    worker = worker or WorkerProcess(plan, case_id.partition(":")[0], root)
                    result = worker.run(case_id, plan.timeout)
                except (RuntimeError, BrokenPipeError) as error:
                    result = Result(case_id, "error", 0.0, str(error))
                result.retries = tries
                if worker and result.status in ("timeout", "error"):
                    worker.end()
                    worker = None
                if result.good or tries >= max(plan.retries, 3 if result.is_race else 0):
                    break
                tries += 1
            yield result
    finally:
        if worker:
            worker.end()
