"""Floating-point types that users choose."""

import jax
import jax.numpy as jnp
import pytest
from jax_cases import make_params

from unified_ddp.jax import DistributedDataParallel
from unified_ddp.jax.pytrees.precision import cast_floating

pytestmark = pytest.mark.timeout(120)


def test_wrong_reduce_dtype() -> None:
    with pytest.raises(ValueError, match="reduce_dtype takes a floating-point type"):
        DistributedDataParallel(make_params(), reduce_dtype=jnp.int8)


def test_only_floating_point_arrays_are_cast() -> None:
    tree = {"w": jnp.ones(2), "n": jnp.int32(1), "key": jax.random.key(0), "c": jnp.ones(1, jnp.complex64), "f": abs}
    cast = cast_floating(tree, jnp.bfloat16)
    assert cast["w"].dtype == jnp.bfloat16
    assert all(cast[name] is tree[name] for name in ("n", "key", "c", "f"))
    assert cast_floating(tree, None) is tree
