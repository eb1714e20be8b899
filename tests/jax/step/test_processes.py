"""What processes tell each other, through a store of this test's own; test_end_to_end_processes has real ones."""

import sys
from typing import Any

import jax
import pytest

from unified_ddp.errors import MisuseError, StallError
from unified_ddp.jax.step import processes
from unified_ddp.jax.step.processes import ProcessGathering, ProgressBoard


class Store:
    """As `jax.distributed`'s; what is not there is waited for in vain."""

    def __init__(self, **values: str) -> None:
        self.values = values

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        assert allow_overwrite or key not in self.values
        self.values[key] = value

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> str:
        if key not in self.values:
            raise RuntimeError(f"DEADLINE_EXCEEDED after {timeout_ms} ms" if self.values else "connection lost")
        return self.values[key]

    def key_value_dir_get(self, prefix: str) -> list[tuple[str, str]]:
        return [(key, value) for key, value in self.values.items() if key.startswith(prefix)]


@pytest.fixture(autouse=True)
def two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)


def _use(monkeypatch: pytest.MonkeyPatch, store: Any) -> Any:
    monkeypatch.setattr(processes, "_store", lambda: store)
    return store


def test_a_process_that_does_not_come_to_a_gathering(monkeypatch: pytest.MonkeyPatch) -> None:
    store = _use(monkeypatch, Store())
    with pytest.raises(StallError, match=r"^process 1 did not come to the test within 2 s; every process must come to"):
        ProcessGathering("the test", 2).all_gather_text("mine")
    assert list(store.values.values()) == ["mine"]


def test_other_errors_of_the_store_come_through(monkeypatch: pytest.MonkeyPatch) -> None:
    store = _use(monkeypatch, Store())
    monkeypatch.setattr(store, "key_value_set", lambda *_: None)
    with pytest.raises(RuntimeError, match="connection lost"):
        ProcessGathering("the test", 2).all_gather_ints(3)


def test_who_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    store, board = _use(monkeypatch, Store()), ProgressBoard("train_step 0")
    assert board.behind(0) == {0: None, 1: None}
    for step in (3, 5):
        board.report(step)
    store.key_value_set("unified_ddp/progress/train_step 0/1", "4")
    assert (board.behind(4), board.behind(5)) == ({}, {1: 4})


def test_no_coordinator() -> None:
    with pytest.raises(MisuseError, match=r"several processes, but no coordinator: call unified_ddp\.jax\.initialize"):
        ProcessGathering("the test", 1).all_gather_text("mine")


def test_a_jax_that_hides_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax._src.distributed", None)
    board = ProgressBoard("train_step 0")
    board.report(1)
    assert board.behind(1) is None
