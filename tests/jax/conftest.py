import contextlib
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


@contextlib.contextmanager
def _optimising_little(flag: bool) -> Iterator[None]:
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", flag)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module", autouse=True)
def quick_compilation() -> Iterator[None]:
    """Compiles faster, as these tests compile much and compute little; scripts that they start are fully optimised."""
    with _optimising_little(True):
        yield


@pytest.fixture
def full_optimisation() -> Iterator[None]:
    """Compiles as for users."""
    with _optimising_little(False):
        yield


@pytest.fixture(params=MAPPINGS)
def mapping(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[("checked", 2), ("checked", 4), ("unchecked", 4), ("pmap", 2), ("vmap", 4)], ids=str)
def replicas(request: pytest.FixtureRequest) -> Replicas:
    """Every way to map a function over replicas, on 2 or 4 of them."""
    return Replicas(*request.param)


@pytest.fixture(params=["checked", "vmap"])
def pair(request: pytest.FixtureRequest) -> Replicas:
    """Two replicas, on two devices where types say what varies, and on one device where they do not."""
    return Replicas(request.param, 2)
