import os
import shutil
import subprocess
from collections.abc import Callable, Iterator

import pytest
from support.world import World

collect_ignore = ["ports"]
"""Needs other libraries' models: `make test-ports`."""

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")


@pytest.fixture(scope="session")
def _worlds() -> Iterator[dict[int, World]]:
    worlds: dict[int, World] = {}
    yield worlds
    for world in worlds.values():
        world.stop()


@pytest.fixture
def world(_worlds: dict[int, World]) -> Callable[[int], World]:
    """`world(n)` is n ranks over gloo, kept for the whole session."""

    def get(size: int) -> World:
        return _worlds.setdefault(size, World(size))

    return get


def _has_gpu() -> bool:
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True, timeout=60).returncode == 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _has_gpu():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="nvidia-smi finds no GPU on this machine"))
