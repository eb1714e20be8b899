"""One of several processes: runs every case and writes its replicas' results. Arguments: port, rank, size, file."""

import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

port, rank, size, out = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", size, rank, initialization_timeout=60)

from jax_cases import loss_fn, make_batch, make_params  # noqa: E402

from unified_ddp.jax import DistributedDataParallel  # noqa: E402
from unified_ddp.plan import MIB  # noqa: E402

mesh = Mesh(np.array(jax.devices()), ("data",))


def place(tree: Any, spec: Any) -> Any:
    """Global arrays of this process's values: a replicated array may then differ by process."""

    def one(leaf: Any) -> jax.Array:
        array = np.asarray(leaf)
        return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])

    return jax.tree.map(one, tree)


def run(step: Any, shared: Any, split: Any, check_vma: bool) -> dict[str, np.ndarray]:
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma)
    result = jax.block_until_ready(jax.jit(mapped)(place(shared, P()), place(split, P("data"))))
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): np.stack([s.data for s in array.addressable_shards])
        for path, array in jax.tree_util.tree_leaves_with_path(result)
    }


def gradients(strategy: Any, check_vma: bool) -> dict[str, np.ndarray]:
    params = make_params()
    ddp = DistributedDataParallel(params, bucket_cap_mb=40 / MIB, strategy=strategy)
    return run(lambda p, b: ddp.value_and_grad(loss_fn)(p, b)[1], params, make_batch(), check_vma)


def broadcast(check_vma: bool) -> dict[str, np.ndarray]:
    """From the last replica: params that differ by process, and buffers of narrow types."""
    ddp = DistributedDataParallel(make_params())
    params = {"w": np.full(3, rank, np.float32), "n": np.int32(rank), "on": np.array([rank == 1, False])}
    half = np.arange(8, dtype=np.float16).reshape(4, 2)
    return run(lambda p, b: ddp.broadcast_from({**p, "half": b}, 3), params, half, check_vma)


results = {
    f"{strategy}/{check}/{name}": value
    for strategy in ("flat", "tuple")
    for check in (True, False)
    for name, value in gradients(strategy, check).items()
}
results |= {f"broadcast/{check}/{name}": value for check in (True, False) for name, value in broadcast(check).items()}
results["default_strategy"] = np.array(DistributedDataParallel(make_params()).strategy)
np.savez(out, **results)
