"""What each of several processes runs in shard_map over the devices of all."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_cases import loss_fn, make_batch, make_params

from unified_ddp.jax import DistributedDataParallel, all_reduce_gradients, varying
from unified_ddp.plan import MIB


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()), ("data",))


def place(tree: Any, spec: Any) -> Any:
    """Global arrays of this process's values: a replicated array may then differ by process."""

    def one(leaf: Any) -> jax.Array:
        array = np.asarray(leaf)
        return jax.make_array_from_callback(array.shape, NamedSharding(mesh(), spec), lambda index: array[index])

    return jax.tree.map(one, tree)


def own(tree: Any) -> Any:
    """The values on this process's replicas, with a leading axis of replicas."""
    return jax.tree.map(lambda array: np.stack([np.asarray(s.data) for s in array.addressable_shards]), tree)


def _run(step: Callable[..., Any], shared: Any, split: Any, check_vma: bool) -> Any:
    mapped = jax.shard_map(step, mesh=mesh(), in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma)
    return own(jax.block_until_ready(jax.jit(mapped)(place(shared, P()), place(split, P("data")))))


def _gradients(strategy: Any, check_vma: bool) -> Any:
    params = make_params()
    ddp = DistributedDataParallel(params, bucket_cap_mb=40 / MIB, strategy=strategy)
    return _run(lambda p, b: ddp.value_and_grad(loss_fn)(p, b)[1], params, make_batch(), check_vma)


def _optax(check_vma: bool) -> Any:
    optimizer = optax.chain(all_reduce_gradients("data"), optax.scale(-2.0))

    def step(params: Any, batch: Any) -> Any:
        grads = jax.grad(loss_fn)(varying(params, "data"), batch)
        return optimizer.update(grads, optimizer.init(params), params)[0]

    return _run(step, make_params(), make_batch(), check_vma)


def _broadcast(check_vma: bool) -> Any:
    """From the last replica: params that differ by process, and buffers of narrow types."""
    ddp, rank = DistributedDataParallel(make_params()), jax.process_index()
    params = {"w": np.full(3, rank, np.float32), "n": np.int32(rank), "on": np.array([rank == 1, False])}
    half = np.arange(8, dtype=np.float16).reshape(4, 2)
    return _run(lambda p, b: ddp.broadcast_from({**p, "half": b}, 3), params, half, check_vma)


def results() -> dict[str, Any]:
    return {
        "gradients": {(s, check): _gradients(s, check) for s in ("flat", "tuple") for check in (True, False)},
        "optax": {check: _optax(check) for check in (True, False)},
        "broadcast": {check: _broadcast(check) for check in (True, False)},
        "default_strategy": DistributedDataParallel(make_params()).strategy,
    }
