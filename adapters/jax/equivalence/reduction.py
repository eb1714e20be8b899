"""One backward on several devices through the real layer, here if there are enough devices, or in a new process."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from unified_ddp.equivalence.side import Arrays, Reduction
from unified_ddp.equivalence.spawn import run_ranks
from unified_ddp.jax.ddp import DistributedDataParallel
from unified_ddp.jax.equivalence.arrays import batch_in, precision, scalar
from unified_ddp.jax.pytrees.schema import param_specs
from unified_ddp.plan import BucketPlan

_AXIS = "data"
_DEVICE_COUNT = "--xla_force_host_platform_device_count"


@dataclass(frozen=True)
class _Job:
    side: Any
    values: Arrays
    shards: Sequence[Any]
    dtype: str
    buckets: Sequence[Sequence[str]] | None
    x64: bool


def reduce_on_devices(
    side: Any, values: Arrays, shards: Sequence[Any], dtype: str, buckets: Sequence[Sequence[str]] | None = None
) -> Reduction:
    """See `Side.reduce`: `shard_map` over as many devices as there are shards.

    With fewer devices than shards, a new process has as many CPU devices as it takes.
    """
    job = _Job(side, values, shards, dtype, buckets, bool(jax.config.jax_enable_x64))  # type: ignore[attr-defined]
    if jax.device_count() >= len(shards):
        return _reduce(job)
    kept = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_DEVICE_COUNT)]
    flags = " ".join([*kept, f"{_DEVICE_COUNT}={len(shards)}"])
    (reduction,) = run_ranks(
        "unified_ddp.jax.equivalence.reduction:run_rank",
        job,
        1,
        environment={"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": str(int(job.x64))},
        modules=side.modules(),
    )
    return reduction


def run_rank(job: _Job, rank: int, ranks: int, directory: Path) -> Reduction:
    """Runs in the new process, which holds all devices."""
    return _reduce(job)


def _reduce(job: _Job) -> Reduction:
    side, count = job.side, len(job.shards)
    local = tuple(side.evaluate(job.values, shard, job.dtype).gradients for shard in job.shards)
    with precision(job.dtype):
        params, buffers = side.placed(job.values, job.dtype)
        ddp = side.wrap(params, job.buckets)
        mesh = Mesh(np.asarray(jax.devices()[:count]), (_AXIS,))
        batch = jax.tree.map(lambda *parts: jnp.stack(parts), *[batch_in(shard, job.dtype) for shard in job.shards])

        def replica(params: Any, buffers: Any, batch: Any) -> Any:
            mine = jax.tree.map(lambda leaf: leaf[0], batch)
            loss_fn = ddp.value_and_grad(lambda p: scalar(side.program.call(p, buffers, mine)[0]))
            _, grads = loss_fn(params)
            return jax.tree.map(lambda grad: grad[None], grads)

        mapped = jax.shard_map(replica, mesh=mesh, in_specs=(P(), P(), P(_AXIS)), out_specs=P(_AXIS), check_vma=False)
        stacked = {name: np.asarray(grads) for name, grads in jax.jit(mapped)(params, buffers, batch).items()}
    reduced = tuple({name: np.conj(grads[rank]) for name, grads in stacked.items()} for rank in range(count))
    return Reduction(reduced, local, _buckets(ddp.plan))


def reduce_by_step(
    side: Any, step: Callable[..., Any], values: Arrays, batch: Any, shards: Sequence[Any], dtype: str
) -> Reduction:
    """Runs the user's own step on the whole batch, and plain gradients of each shard on one device."""
    local = tuple(side.evaluate(values, shard, dtype).gradients for shard in shards)
    with precision(dtype):
        params, _ = side.placed(values, dtype)
        tree = side.program.params
        grads = tree.same_leaves(step(tree.build(params), batch_in(batch, dtype)))
        whole = {name: np.conj(_gathered(grad)) for name, grad in grads.items()}
    return Reduction((whole,), local, ())


def _gathered(grad: Any) -> np.ndarray:
    """The whole array, of whatever sharding; across processes by a gather that all take part in."""
    if getattr(grad, "is_fully_addressable", True):
        return np.asarray(grad)
    from jax.experimental.multihost_utils import process_allgather

    return np.asarray(process_allgather(grad, tiled=True))


def _buckets(plan: BucketPlan) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(plan.params[i].name for i in bucket.params) for bucket in plan.buckets)


def default_layer(params: dict[str, Any], buckets: Sequence[Sequence[str]] | None) -> DistributedDataParallel:
    """Returns our layer on named parameters, in these buckets if given, cut where dtypes differ."""
    if not buckets:
        return DistributedDataParallel(params, axis_name=_AXIS)
    specs = param_specs(params)
    index = {spec.name: i for i, spec in enumerate(specs)}
    cut: list[list[int]] = []
    for names in buckets:
        for dtype in dict.fromkeys(specs[index[name]].dtype for name in names):
            cut.append([index[name] for name in names if specs[index[name]].dtype == dtype])
    return DistributedDataParallel(params, axis_name=_AXIS, plan=BucketPlan(specs, cut))
