"""What processes tell each other beside collectives, through the key-value store of `jax.distributed`."""

import itertools
import json
from typing import Any

import jax

from unified_ddp.errors import MisuseError, StallError

__all__ = ["ProcessGathering", "ProgressBoard"]

_PREFIX = "unified_ddp"
_numbers = itertools.count()


def _client() -> Any:
    """The store's client. JAX has no public way to it; orbax and flax use the same one."""
    from jax._src import distributed

    client = distributed.global_state.client
    if client is None:
        raise MisuseError("several processes, but no coordinator: call unified_ddp.jax.initialize() at the start")
    return client


class ProcessGathering:
    """Gathers small things from all processes. Every process calls the same methods in the same order.

    Args:
        what: names the caller in errors.
        timeout: seconds to wait for the others.
    """

    def __init__(self, what: str, timeout: float) -> None:
        self._what = what
        self._timeout = timeout

    def all_gather_ints(self, value: int) -> list[int]:
        """Returns every process's integer, by process."""
        return [int(text) for text in self.all_gather_text(str(value))]

    def all_gather_text(self, text: str) -> list[str]:
        """Returns every process's text, by process.

        Raises:
            StallError: a process did not give its text in time.
        """
        if jax.process_count() == 1:
            return [text]
        client, prefix = _client(), f"{_PREFIX}/gather/{next(_numbers)}"
        client.key_value_set(f"{prefix}/{jax.process_index()}", text)
        return [self._get(client, f"{prefix}/{process}", process) for process in range(jax.process_count())]

    def _get(self, client: Any, key: str, process: int) -> str:
        try:
            return client.blocking_key_value_get(key, int(self._timeout * 1000))
        except Exception as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            raise StallError(
                f"process {process} did not come to {self._what} within {self._timeout:g} s; every process must "
                "come to it, in the same order"
            ) from error


class ProgressBoard:
    """Where processes that wait for a step say so. Nothing is written while steps end in good time.

    Args:
        name: the same in all processes, and no other board's.
    """

    def __init__(self, name: str) -> None:
        self._prefix = f"{_PREFIX}/progress/{name}/"

    def report(self, step: int) -> None:
        """Says that this process waits for the end of a step."""
        _client().key_value_set(f"{self._prefix}{jax.process_index()}", json.dumps(step), allow_overwrite=True)

    def behind(self, step: int) -> dict[int, int | None]:
        """Returns the processes that do not wait for this step or a later one, with the last that they waited for."""
        waiting = dict(_client().key_value_dir_get(self._prefix))
        last = {int(key.rsplit("/", 1)[-1]): json.loads(value) for key, value in waiting.items()}
        return {p: last.get(p) for p in range(jax.process_count()) if last.get(p, -1) < step}
