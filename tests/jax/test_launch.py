"""What torchrun's environment says to JAX."""

from typing import Any

import jax
import pytest

from unified_ddp.jax import initialize

TORCHRUN = {"MASTER_ADDR": "first", "MASTER_PORT": "29500", "RANK": "3", "WORLD_SIZE": "4"}
GIVES = {"coordinator_address": "first:30500", "num_processes": 4, "process_id": 3}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **arguments: made.append(arguments))
    for name in (*TORCHRUN, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return made


@pytest.mark.parametrize(
    ("env", "arguments", "want"),
    [
        (TORCHRUN, {}, GIVES),
        (TORCHRUN | {"MASTER_PORT": "65000"}, {}, GIVES | {"coordinator_address": "first:64000"}),
        (TORCHRUN | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, {}, GIVES | {"local_device_ids": [1]}),
        (TORCHRUN | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, {}, GIVES),
        (TORCHRUN | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "1"}, {}, GIVES),
        (TORCHRUN, {"coordinator_address": "second:1"}, GIVES | {"coordinator_address": "second:1"}),
        ({}, {"process_id": 0, "initialization_timeout": 5}, {"process_id": 0, "initialization_timeout": 5}),
    ],
)
def test_arguments(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, env: Any, arguments: Any, want: dict[str, Any]
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    initialize(**arguments)
    assert calls == [want]


def test_an_environment_in_part(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="has RANK, WORLD_SIZE but not MASTER_ADDR, MASTER_PORT; launch with torchrun"):
        initialize()
    assert not calls


def _no_launcher(**_: Any) -> None:
    raise ValueError("coordinator_address should be defined.")


def test_alone(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.distributed, "initialize", _no_launcher)
    initialize()
    with pytest.raises(ValueError, match="coordinator_address should be defined"):
        initialize(process_id=0)
