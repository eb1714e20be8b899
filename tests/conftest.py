import os
from collections.abc import Callable, Iterator

import pytest
from support.world import World

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
