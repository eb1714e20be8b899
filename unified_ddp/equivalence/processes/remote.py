"""A side whose program runs in a process of its own, with a Python of its own if need be."""

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import unified_ddp
from unified_ddp.equivalence.errors import EquivalenceError
from unified_ddp.equivalence.processes.child import Child, host_devices, loopback, stacks, stop_all
from unified_ddp.equivalence.processes.loading import Program
from unified_ddp.equivalence.processes.messages import Closed, receive, send
from unified_ddp.equivalence.results import SideInfo
from unified_ddp.equivalence.side import Arrays, Evaluation, Reduction, TensorInfo, Trajectory
from unified_ddp.errors import UnifiedDDPError

_POLL_SECONDS = 0.2
_END_SECONDS = 5.0
"""Between the end of what a process says and its own."""


class SideRaisedError(UnifiedDDPError, RuntimeError):
    """A side's program raised; the text has its error and the lines of its file."""


def find_python(option: str, python: str | None) -> str:
    """Returns the path of an interpreter that has this version of unified_ddp, this one if `python` is None.

    Raises:
        EquivalenceError: there is no such program, or it has another version or none.
    """
    if python is None:
        return sys.executable
    found = shutil.which(python)
    if found is None:
        raise EquivalenceError(f"{option} {python}: there is no such program")
    command = [found, "-P", "-c", "import unified_ddp; print(unified_ddp.__version__)"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EquivalenceError(f"{option} {python}: it cannot be run: {error}") from error
    version = done.stdout.strip()
    if done.returncode or version != unified_ddp.__version__:
        has = f"has unified_ddp {version}" if not done.returncode else (done.stderr.strip() or "fails").splitlines()[-1]
        raise EquivalenceError(
            f"{option} {python}: {has}; install unified_ddp {unified_ddp.__version__} there, as here"
        )
    return found


class RemoteSide:
    """A side in a process, answered for by it; see `Side`. Use as a context manager, which ends the process.

    Args:
        program: makes the side.
        python: path of the interpreter.
        directory: for its output.
        ranks: the number of devices that JAX shows of a CPU.
        timeout: seconds that an answer may take.

    Raises:
        EquivalenceError: the program cannot be run, or is no side.
    """

    def __init__(self, program: Program, python: str, directory: Path, ranks: int, timeout: float) -> None:
        self.program, self._timeout = program, timeout
        ours, theirs = socket.socketpair()
        self._stream = ours
        self._stream.settimeout(_POLL_SECONDS)
        # -P: the current directory stays out of sys.path, where a user's jax.py or torch.py would be found first.
        worker = "unified_ddp.equivalence.processes.worker"
        command = [python, "-P", "-u", "-m", worker, str(theirs.fileno()), str(program.path), program.function]
        log = directory / f"{len(list(directory.iterdir()))}.log"
        environment = {**loopback(), **host_devices(ranks)}
        with theirs:
            self._child = Child(f"the process of {program}", command, environment, log, [theirs.fileno()])
        self._told: dict[str, Any] | None = None
        self._tensors: tuple[TensorInfo, ...] | None = None

    def __enter__(self) -> "RemoteSide":
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the process."""
        stop_all([self._child])
        self._stream.close()

    def start(self) -> "RemoteSide":
        """Waits until the side is made."""
        if self._told is None:
            self._told = self._answer("making the side")
        return self

    @property
    def framework(self) -> str:
        """See `Side`."""
        return str(self._known["framework"])

    @property
    def has_optimizer(self) -> bool:
        """See `Side`."""
        return bool(self._known["has_optimizer"])

    @property
    def batches(self) -> list[Any] | None:
        """The batches that the program gave; None if it gave a side alone."""
        found: list[Any] | None = self._known["batches"]
        return found

    def tensors(self) -> tuple[TensorInfo, ...]:
        """See `Side`."""
        if self._tensors is None:
            self._tensors = tuple(self._call("tensors"))
        return self._tensors

    def values(self) -> Arrays:
        """See `Side`."""
        return self._call("values")

    def randomness(self, values: Arrays, batch: Any) -> str:
        """See `Side`."""
        return self._call("randomness", values, batch)

    def evaluate(self, values: Arrays, batch: Any, dtype: str, *, gradients: bool = True) -> Evaluation:
        """See `Side`."""
        return self._call("evaluate", values, batch, dtype, gradients=gradients)

    def reduce(
        self, values: Arrays, shards: Sequence[Any], dtype: str, buckets: Sequence[Sequence[str]] | None = None
    ) -> Reduction:
        """See `Side`."""
        return self._call("reduce", values, list(shards), dtype, buckets=buckets)

    def update(self, values: Arrays, gradients: Sequence[Arrays], dtype: str) -> tuple[Arrays, ...]:
        """See `Side`."""
        return self._call("update", values, list(gradients), dtype)

    def train(self, values: Arrays, batches: Sequence[Any], dtype: str) -> Trajectory:
        """See `Side`."""
        return self._call("train", values, list(batches), dtype)

    def info(self) -> SideInfo:
        """See `Side`."""
        return self._call("info")

    @property
    def _known(self) -> dict[str, Any]:
        self.start()
        assert self._told is not None
        return self._told

    def _call(self, method: str, *positional: Any, **named: Any) -> Any:
        self.start()
        self._stream.settimeout(self._timeout)  # for the whole of a message
        try:
            send(self._stream, (method, positional, named))
        except OSError as error:
            raise self._ended() from error
        self._stream.settimeout(_POLL_SECONDS)
        return self._answer(method)

    def _answer(self, what: str) -> Any:
        deadline = time.monotonic() + self._timeout

        def idle() -> None:
            if self._child.process.poll() is not None:
                raise self._ended()
            if time.monotonic() > deadline:
                raise EquivalenceError(
                    f"{self._child.name} did not answer in {self._timeout:g} seconds ({what}). It hangs, or the "
                    f"machine is slow and needs a longer --timeout. Where it is:\n{stacks([self._child])}"
                )

        try:
            answer = receive(self._stream, idle)
        except Closed as error:
            raise self._ended() from error
        if "value" in answer:
            return answer["value"]
        if answer["cannot compare"]:
            raise EquivalenceError(answer["error"])
        raise SideRaisedError(f"{self.program}, in {what}, raised {answer['error']}")

    def _ended(self) -> EquivalenceError:
        try:
            self._child.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            stop_all([self._child])
        return EquivalenceError(self._child.how_it_ended())
