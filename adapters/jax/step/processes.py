"""What processes tell each other beside collectives, through the key-value store of `jax.distributed`."""

import itertools
import json
import threading
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from unified_ddp.errors import MisuseError, StallError

_PREFIX = "unified_ddp"
_numbers = itertools.count()


def _store() -> Any:
    """The store's client; None if this version of JAX hides it. There is no public way; orbax and flax use this one."""
    try:
        from jax._src.distributed import global_state

        client = global_state.client
    except (ImportError, AttributeError):
        return None
    if client is None:
        raise MisuseError("several processes, but no coordinator: call unified_ddp.jax.initialize() at the start")
    return client


class ProcessGathering:
    """Gathers small things from all processes. Every process calls the same methods in the same order.

    Args:
        what: names the caller in errors.
        timeout: seconds to wait for the others; None waits for ever.
    """

    def __init__(self, what: str, timeout: float | None) -> None:
        self._what = what
        self._timeout = timeout or threading.TIMEOUT_MAX

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
        if (store := _store()) is None:
            return _all_gather_by_collectives(text)
        prefix = f"{_PREFIX}/gather/{next(_numbers)}"
        store.key_value_set(f"{prefix}/{jax.process_index()}", text)
        return [self._get(store, f"{prefix}/{process}", process) for process in range(jax.process_count())]

    def _get(self, store: Any, key: str, process: int) -> str:
        try:
            return store.blocking_key_value_get(key, int(self._timeout * 1000))
        except Exception as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            raise StallError(
                f"process {process} did not come to {self._what} within {self._timeout:g} s; every process must "
                "come to it, in the same order"
            ) from error


def _all_gather_by_collectives(text: str) -> list[str]:
    """Without the store, there is no limit to the wait."""
    own = np.frombuffer(text.encode(), np.uint8)
    counts = multihost_utils.process_allgather(np.int32(len(own)))
    every = multihost_utils.process_allgather(np.pad(own, (0, int(counts.max()) - len(own))))
    return [bytes(row[:count]).decode() for row, count in zip(np.asarray(every), counts, strict=True)]


class ProgressBoard:
    """Where processes that wait for a step say so. Nothing is written while steps end in good time.

    Args:
        name: the same in all processes, and no other board's.
    """

    def __init__(self, name: str) -> None:
        self._prefix = f"{_PREFIX}/progress/{name}/"

    def report(self, step: int) -> None:
        """Says that this process waits for the end of a step."""
        if (store := _store()) is not None:
            store.key_value_set(f"{self._prefix}{jax.process_index()}", json.dumps(step), allow_overwrite=True)

    def behind(self, step: int) -> dict[int, int | None] | None:
        """Returns the processes that do not wait for this step or a later one, with the last that they waited for.

        None means that it is not known.
        """
        if (store := _store()) is None:
            return None
        last = {int(key.rsplit("/", 1)[-1]): json.loads(value) for key, value in store.key_value_dir_get(self._prefix)}
        return {p: last.get(p) for p in range(jax.process_count()) if last.get(p, -1) < step}
