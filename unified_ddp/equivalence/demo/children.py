"""The child processes of one run: started, watched, and always ended, by their own handles."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from unified_ddp.equivalence.demo.config import Side, VerifyConfig, VerifyError
from unified_ddp.equivalence.demo.exchange import Exchange

_DEVICE_COUNT = "--xla_force_host_platform_device_count"
_LOG_LINES = 15
_GRACE_SECONDS = 2.0
_STACK_SECONDS = 0.5


@dataclass(frozen=True)
class _Child:
    side: Side
    rank: int
    process: subprocess.Popen[bytes]

    @property
    def name(self) -> str:
        return f"torch rank {self.rank}" if self.side is Side.TORCH else "the jax process"


class Children:
    """One process for each torch rank and one for all JAX devices. Use as a context manager."""

    def __init__(self, exchange: Exchange, config: VerifyConfig) -> None:
        self._exchange = exchange
        self._children: list[_Child] = []
        try:
            for rank in range(config.world_size):
                self._start(Side.TORCH, rank, _torch_environment())
            self._start(Side.JAX, 0, _jax_environment(config))
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> "Children":
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def check(self) -> None:
        """Raises VerifyError if a child has failed, with the end of its output."""
        failed = [child for child in self._children if child.process.poll() not in (None, 0)]
        if failed:
            raise VerifyError("\n".join(self._describe(child) for child in failed))

    def name(self, side: Side, rank: int) -> str:
        """Returns what messages call the process of a rank."""
        return next(c.name for c in self._children if c.side is side and (c.rank == rank or side is Side.JAX))

    def where(self) -> str:
        """Asks every child that still runs for its stack (see worker.py) and returns the end of each one's output."""
        if hasattr(signal, "SIGUSR1"):
            for child in self._children:
                child.process.send_signal(signal.SIGUSR1)  # does nothing to one that has ended
            time.sleep(_STACK_SECONDS)
        return "\n".join(
            f"{child.name} (pid {child.process.pid}) {'has ended' if child.process.poll() is not None else 'runs'}:\n"
            f"{self._said(child)}"
            for child in self._children
        )

    def stop(self) -> None:
        """Ends every child that still runs: asks, waits a moment, then kills. Each is waited for."""
        running = [child.process for child in self._children if child.process.poll() is None]
        for process in running:
            process.terminate()
        for process in running:
            try:
                process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for child in self._children:
            if child.process.stdin:
                child.process.stdin.close()

    def _start(self, side: Side, rank: int, environment: dict[str, str]) -> None:
        # -P: the current directory stays out of sys.path, where a user's jax.py or torch.py would be found first.
        command = [
            sys.executable,
            "-P",
            "-m",
            "unified_ddp.equivalence.demo.worker",
            str(self._exchange.directory),
            side,
            str(rank),
        ]
        with self._exchange.log(side, rank).open("wb") as log:
            process = subprocess.Popen(
                command, env={**os.environ, **environment}, stdin=subprocess.PIPE, stdout=log, stderr=log
            )
        self._children.append(_Child(side, rank, process))

    def _describe(self, child: _Child) -> str:
        status = child.process.returncode
        how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        head = f"{child.name} (pid {child.process.pid}) {how} before it was done; the end of its output:"
        return f"{head}\n{self._said(child)}"

    def _said(self, child: _Child) -> str:
        lines = self._exchange.log(child.side, child.rank).read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return "\n".join(f"    {line}" for line in lines) or "    (nothing)"


def _torch_environment() -> dict[str, str]:
    # All ranks are on this machine: gloo need not resolve its host name, which fails in many containers.
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if Path("/sys/class/net/lo").exists() else {}
    return {"OMP_NUM_THREADS": "1", **loopback}


def _jax_environment(config: VerifyConfig) -> dict[str, str]:
    kept = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_DEVICE_COUNT)]
    flags = " ".join([*kept, f"{_DEVICE_COUNT}={config.world_size}"])
    return {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": str(int(config.dtype == "float64"))}
