"""One replica's values for all, bit for bit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax_cases import Replicas, mesh

from unified_ddp.jax import DistributedDataParallel

pytestmark = pytest.mark.timeout(120)

DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "int32", "uint16", "bool", "complex64", "int4"]


def _bits(array: Any) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def _ddp(strategy: Any = None) -> DistributedDataParallel:
    return DistributedDataParallel({"w": jnp.ones(2)}, strategy=strategy)


@pytest.mark.parametrize(("mapping", "strategy"), [("checked", "flat"), ("vmap", "tuple")])
def test_every_dtype_from_the_last_replica(mapping: str, strategy: Any) -> None:
    ddp, source = _ddp(strategy), 1
    values = np.random.default_rng(0).integers(0, 2, (2, 3, 2))
    buffers = {dtype: jnp.asarray(values).astype(dtype) for dtype in DTYPES}
    got = Replicas(mapping, 2)(lambda _, b: ddp.broadcast_from(b, source), None, buffers)
    for dtype, result in got.items():
        assert result.dtype == buffers[dtype].dtype
        for value in result:
            assert _bits(value) == _bits(np.asarray(buffers[dtype])[source : source + 1].reshape(value.shape))


@pytest.mark.parametrize("strategy", ["flat", "tuple"])
def test_replicated_by_type(strategy: Any) -> None:
    """Also what is empty, and what does not vary over a model axis beside what does."""
    specs = {"split": P("model"), "whole": P(), "empty": P()}
    buffers = {"split": jnp.arange(2.0), "whole": jnp.ones(3), "empty": jnp.zeros((0, 3))}
    ddp = DistributedDataParallel({"w": jnp.ones(3)}, strategy=strategy)
    mapped = jax.shard_map(
        lambda x: ddp.sync_buffers(ddp.varying(x)), mesh=mesh(2, "data", 2, "model"), in_specs=(specs,), out_specs=specs
    )
    assert jax.tree.all(jax.tree.map(jnp.array_equal, jax.jit(mapped)(buffers), buffers))


@pytest.mark.parametrize("strategy", ["flat", "tuple"])
def test_special_values_arrive_and_do_not_leak(replicas: Replicas, strategy: Any) -> None:
    own = np.array([-0.0, np.inf, -np.inf, 1e-45, 3.0, np.nan], np.float32)
    own[-1:] = np.array([0x7FA12345], np.uint32).view(np.float32)  # a signalling NaN with a payload
    others = np.full((replicas.size - 1, 6), np.nan, np.float32)
    ddp = _ddp(strategy)
    buffers = {"a": jnp.asarray(np.vstack([own[None], others])), "b": jnp.asarray(np.vstack([own[None], others]))}
    got = replicas(lambda _, b: ddp.sync_buffers(b), None, buffers)
    for name in ("a", "b"):
        for value in got[name]:
            assert _bits(value) == own.tobytes()


def test_float64_and_wide_integers(pair: Replicas) -> None:
    with jax.enable_x64(True):
        ddp = _ddp("flat")
        buffers = {
            "f": jnp.array([-0.0, np.nan], jnp.float64),
            "i": jnp.array([2**62 + 1, 5]),
            "c": jnp.array([1 - 0j, 2j], jnp.complex128),
            "s": jnp.array([1, 2], jnp.int32),
            "t": jnp.array([3, 4], jnp.int32),
        }
        got = pair(lambda _, b: ddp.sync_buffers(b), None, buffers)
        for name, value in got.items():
            assert value.dtype == buffers[name].dtype
            assert _bits(value[1]) == _bits(buffers[name][0])


def test_prng_keys_and_other_leaves(pair: Replicas) -> None:
    keys = jax.random.split(jax.random.key(7), 2)
    ddp = _ddp()

    def step(_: Any, key: Any) -> Any:
        synced = ddp.broadcast_from({"key": key, "none": None, "name": "bn", "number": 3}, 1)
        assert synced["name"] == "bn"
        assert synced["none"] is None
        return jax.random.key_data(synced["key"]), synced["number"]

    data, number = pair(step, None, keys)
    assert np.array_equal(data.reshape(2, 2), np.stack([jax.random.key_data(keys)[1]] * 2))
    assert np.array_equal(number, [3, 3])


def test_replicated_by_type_is_sent_all_the_same(pair: Replicas) -> None:
    """Processes may hold different values of what types call replicated."""
    got = pair(lambda p, _: _ddp().broadcast_from(p, 1), {"w": jnp.arange(3.0)}, jnp.ones(2))
    assert np.array_equal(got["w"], [[0, 1, 2]] * 2)


def test_empty_tree(pair: Replicas) -> None:
    assert pair(lambda _, b: _ddp().sync_buffers({}), None, jnp.ones(2)) == {}


@pytest.mark.parametrize("source", [2, -1, 0.5, "0"])
def test_source_that_is_no_replica(pair: Replicas, source: Any) -> None:
    with pytest.raises(ValueError, match=f"0 to 1, not {source!r}"):
        pair(lambda _, b: _ddp().broadcast_from(b, source), None, jnp.ones(2))
