"""One child process: started, watched, and always ended, by its own handle."""

import contextlib
import faulthandler
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

_DEVICE_COUNT = "--xla_force_host_platform_device_count"
_LOG_LINES = 15
_GRACE_SECONDS = 2.0
_STACK_SECONDS = 0.5


class Child:
    """A process that ends with its parent (see `follow_parent`) and whose output goes to a file.

    It leads a process group, so that what it starts itself is ended with it.

    Args:
        name: what messages call it.
        command: program and arguments.
        environment: changes to the parent's; None removes a variable.
        log: where its output goes.
        pass_fds: file descriptors that it inherits.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str | None],
        log: Path,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.name, self.log = name, log
        merged = {**os.environ, **environment}
        variables = {key: value for key, value in merged.items() if value is not None}
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                env=variables,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                pass_fds=tuple(pass_fds),
                start_new_session=True,
            )

    @property
    def failed(self) -> bool:
        """Says whether it has ended in another way than well."""
        return self.process.poll() not in (None, 0)

    def said(self) -> str:
        """Returns the end of its output, indented."""
        lines = self.log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return "\n".join(f"    {line}" for line in lines) or "    (nothing)"

    def how_it_ended(self) -> str:
        """Returns how an ended child ended, with the end of its output."""
        status = self.process.wait()
        how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        return f"{self.name} (pid {self.process.pid}) {how} before it was done; the end of its output:\n{self.said()}"

    def ask_for_stack(self) -> None:
        """Asks it to write where it is to its output; does nothing to one that has ended."""
        if hasattr(signal, "SIGUSR1"):
            self.process.send_signal(signal.SIGUSR1)

    def where(self) -> str:
        """Returns whether it runs and the end of its output; see `ask_for_stack`."""
        state = "has ended" if self.process.poll() is not None else "runs"
        return f"{self.name} (pid {self.process.pid}) {state}:\n{self.said()}"


def stacks(children: Iterable[Child]) -> str:
    """Asks every child that still runs for its stack and returns the end of each one's output."""
    asked = list(children)
    for child in asked:
        child.ask_for_stack()
    time.sleep(_STACK_SECONDS)
    return "\n".join(child.where() for child in asked)


def stop_all(children: Iterable[Child]) -> None:
    """Ends every child that still runs, and what it started: asks, waits a moment, then kills. Each is waited for."""
    started = list(children)
    running = [child.process for child in started if child.process.poll() is None]
    for process in running:
        process.terminate()
    for process in running:
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for child in started:
        _end_group(child.process.pid)
        if child.process.stdin:
            child.process.stdin.close()


def _end_group(leader: int) -> None:
    """Kills what a child has started and left behind."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing is left; macOS says so by refusing
        os.killpg(leader, signal.SIGKILL)


def follow_parent() -> None:
    """Called by a child: it ends when its parent does, with all that it started, and answers `ask_for_stack`."""
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, all_threads=False)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """The parent holds the other end of stdin: it closes even if the parent is killed, and no child outlives it."""
    while os.read(0, 4096):  # not through sys.stdin, whose lock would be held when the interpreter shuts down
        pass
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def loopback() -> dict[str, str]:
    """Returns the environment by which gloo need not resolve this machine's name, which fails in many containers."""
    return {"GLOO_SOCKET_IFNAME": "lo"} if Path("/sys/class/net/lo").exists() else {}


def host_devices(count: int) -> dict[str, str]:
    """Returns the environment in which XLA shows the CPU as so many devices; other flags of the user's stay."""
    kept = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_DEVICE_COUNT)]
    return {"XLA_FLAGS": " ".join([*kept, f"{_DEVICE_COUNT}={count}"])}
