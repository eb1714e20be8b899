"""The child processes of one run: one for each torch rank and one for all JAX devices."""

import sys

from unified_ddp.equivalence.demo.config import Side, VerifyConfig, VerifyError
from unified_ddp.equivalence.demo.exchange import Exchange
from unified_ddp.equivalence.processes.child import Child, host_devices, loopback, stacks, stop_all


class Children:
    """The children of one run. Use as a context manager, which ends them."""

    def __init__(self, exchange: Exchange, config: VerifyConfig) -> None:
        self._exchange = exchange
        self._children: dict[tuple[Side, int], Child] = {}
        try:
            for rank in range(config.world_size):
                self._start(Side.TORCH, rank, f"torch rank {rank}", {"OMP_NUM_THREADS": "1", **loopback()})
            self._start(Side.JAX, 0, "the jax process", _jax_environment(config))
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> "Children":
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def check(self) -> None:
        """Raises VerifyError if a child has failed, with the end of its output."""
        failed = [child for child in self._children.values() if child.failed]
        if failed:
            raise VerifyError("\n".join(child.how_it_ended() for child in failed))

    def name(self, side: Side, rank: int) -> str:
        """Returns what messages call the process of a rank."""
        return self._children[side, rank if side is Side.TORCH else 0].name

    def where(self) -> str:
        """Asks every child that still runs for its stack and returns the end of each one's output."""
        return stacks(self._children.values())

    def stop(self) -> None:
        """Ends every child that still runs."""
        stop_all(self._children.values())

    def _start(self, side: Side, rank: int, name: str, environment: dict[str, str]) -> None:
        # -P: the current directory stays out of sys.path, where a user's jax.py or torch.py would be found first.
        worker = "unified_ddp.equivalence.demo.worker"
        command = [sys.executable, "-P", "-m", worker, str(self._exchange.directory), side, str(rank)]
        self._children[side, rank] = Child(name, command, environment, self._exchange.log(side, rank))


def _jax_environment(config: VerifyConfig) -> dict[str, str]:
    x64 = str(int(config.dtype == "float64"))
    return {**host_devices(config.world_size), "JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": x64}
