import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Read when JAX makes its CPU devices, which happens at the first use of a device: no test has run yet by then.
_DEVICES = "--xla_force_host_platform_device_count"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=4".strip()
sys.path.append(str(Path(__file__).parent))  # for jax_cases, which the spawned processes import as well

jax = pytest.importorskip("jax")

from jax_cases import MAPPINGS, Replicas  # noqa: E402


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    """Places arrays on the CPU, also where JAX has a GPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture(scope="package", autouse=True)
def quick_compilation() -> Iterator[None]:
    """Compiles several times faster: these tests compile much and compute little. What they start runs as users do."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(params=[2, 4], ids=lambda n: f"{n}replicas")
def size(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(params=MAPPINGS)
def mapping(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def replicas(mapping: str, size: int) -> Replicas:
    """Every way to map a function over replicas, on 2 and 4 of them."""
    return Replicas(mapping, size)


@pytest.fixture
def pair(mapping: str) -> Replicas:
    """Every way to map a function over replicas, on 2 of them."""
    return Replicas(mapping, 2)
