"""Host values as arrays over a mesh: replicated, or split by rows over the data axes."""

import math
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from unified_ddp.errors import AxisError, UnevenDataError
from unified_ddp.jax.pytrees.schema import is_array, is_key, leaf_name


def auto_mesh(mesh: Mesh | None, axes: tuple[str, ...]) -> Mesh:
    """Returns the mesh with axes that are left to the compiler outside of `shard_map`; None takes all devices.

    Raises:
        AxisError: the mesh lacks one of the axes.
        ValueError: no mesh, but several axes.
    """
    if mesh is None:
        if len(axes) != 1:
            raise ValueError(f"give mesh=, as {axes} are several axes and the sizes of each are not known")
        return Mesh(np.array(jax.devices()), axes, axis_types=(AxisType.Auto,))
    if missing := [name for name in axes if name not in mesh.axis_names]:
        raise AxisError(
            f"the mesh has no axis '{missing[0]}', only {', '.join(map(repr, mesh.axis_names))}; name the axis of the "
            "mesh that data is split over as axis_name of DistributedDataParallel"
        )
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def row_specs(batch: Any, axes: tuple[str, ...]) -> Any:
    """Returns how each leaf is split: scalars are for all replicas, everything else is split by rows."""
    return jax.tree.map(lambda leaf: P(axes) if np.ndim(leaf) else P(), batch)


def split_rows(batch: Any, mesh: Mesh, axes: tuple[str, ...], microbatches: int, what: str) -> Any:
    """Returns a process's own rows as global arrays, of which each replica holds a part of equal size.

    Global arrays are taken as they are. Each replica splits its rows into `microbatches`; `what` names the pytree in
    errors.

    Raises:
        UnevenDataError: the replicas of this process cannot have equal parts.
        TypeError: a leaf is no array.
    """
    replicas = _local_replicas(mesh, axes)

    def place(path: Any, leaf: Any) -> jax.Array:
        _require_array(what, path, leaf)
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return leaf
        if np.ndim(leaf) and np.shape(leaf)[0] % (replicas * microbatches):
            raise UnevenDataError(
                f"{what} leaf '{leaf_name(path)}' has {np.shape(leaf)[0]} rows, which {replicas} replica(s) of this "
                f"process cannot share evenly in {microbatches} microbatch(es); drop the remainder, or fill it up with "
                "unified_ddp.jax.pad_batch and pass its weight"
            )
        return _place(leaf, NamedSharding(mesh, P(axes) if np.ndim(leaf) else P()))

    return jax.tree_util.tree_map_with_path(place, batch)


def replicate(tree: Any, mesh: Mesh, what: str) -> Any:
    """Returns the tree with a whole copy of every leaf on each device, from the values of the device's process.

    Arrays that are spread over several devices already stay as they are.

    Raises:
        TypeError: a leaf is no array.
    """
    sharding = NamedSharding(mesh, P())

    def place(path: Any, leaf: Any) -> jax.Array:
        _require_array(what, path, leaf)
        spread = isinstance(leaf, jax.Array) and leaf.sharding.device_set == sharding.device_set
        return leaf if spread and len(sharding.device_set) > 1 else _place(leaf, sharding)

    return jax.tree_util.tree_map_with_path(place, tree)


def host_digests(tree: Any, mesh: Mesh) -> dict[str, int]:
    """Returns checksums by name of the leaves that are not spread over the mesh: host values, or one device's."""

    def spread(leaf: Any) -> bool:
        return isinstance(leaf, jax.Array) and leaf.sharding.num_devices == mesh.size

    if all(map(spread, jax.tree.leaves(tree))):  # as in all steps but the first after a restart
        return {}
    leaves = [(leaf_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree) if not spread(leaf)]
    values = {name: np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf) for name, leaf in leaves}
    return {name: zlib.crc32(value.tobytes()) for name, value in values.items()}


def per_replica(make: Callable[[int], Any], mesh: Mesh, axes: tuple[str, ...]) -> Any:
    """Returns global arrays of which each replica holds its own part, or None if there are none.

    `make` returns, for a number of replicas, a pytree of numpy arrays with a leading axis of replicas, the same in all
    processes; each places those of its devices.
    """
    sharding = NamedSharding(mesh, P(axes))
    tree = make(_replicas(mesh, axes))

    def place(leaf: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: np.array(leaf[index]))

    return jax.tree.map(place, tree) if jax.tree.leaves(tree) else None


def pad_batch(batch: Any, rows: int) -> tuple[Any, np.ndarray]:
    """Fills a batch up to a number of rows, for the last one of an epoch or a process that has fewer.

    Args:
        batch: a pytree of arrays with equally many rows, at most `rows`, perhaps none; scalars stay as they are.
        rows: how many there are to be.

    Returns:
        The batch as numpy arrays, filled up with copies of its first row (zeros if there is none), and the weight of
        each row, shape (rows,): 1 for what was there, 0 for what was added.

    Raises:
        ValueError: the leaves differ in rows, or have more.
    """
    counts = {np.shape(leaf)[0] for leaf in jax.tree.leaves(batch) if np.ndim(leaf)}
    if len(counts) != 1 or max(counts) > rows:
        raise ValueError(f"pad_batch takes leaves with equally many rows, at most {rows}, not {sorted(counts)}")
    have = counts.pop()

    def fill(leaf: Any) -> np.ndarray:
        array = np.asarray(leaf)
        if not array.ndim:
            return array
        row = array[:1] if have else np.zeros((1, *array.shape[1:]), array.dtype)
        return np.concatenate([array, np.repeat(row, rows - have, axis=0)])

    return jax.tree.map(fill, batch), (np.arange(rows) < have).astype(np.float32)


def _local_replicas(mesh: Mesh, axes: tuple[str, ...]) -> int:
    """How many parts of the data are on this process's devices."""
    data_last = np.moveaxis(mesh.devices, [mesh.axis_names.index(name) for name in axes], range(-len(axes), 0))
    by_replica = data_last.reshape(-1, _replicas(mesh, axes)).T
    mine = jax.process_index()
    return sum(any(device.process_index == mine for device in column) for column in by_replica)


def _replicas(mesh: Mesh, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[name] for name in axes)


def _place(leaf: Any, sharding: NamedSharding) -> jax.Array:
    if jax.process_count() == 1:
        return jax.device_put(leaf, sharding)
    if is_key(leaf):
        data = _place(jax.random.key_data(leaf), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    array = np.asarray(leaf)
    array = array.astype(jnp.result_type(leaf), copy=False)  # float64 is float32 to JAX unless x64 is on
    return jax.make_array_from_process_local_data(sharding, array, array.shape if sharding.spec == P() else None)


def _require_array(what: str, path: Any, leaf: Any) -> None:
    if not is_array(leaf):
        raise TypeError(
            f"{what} leaf '{leaf_name(path)}' is a {type(leaf).__name__}, no array; keep it out of the pytree (flax "
            "nnx: nnx.split; equinox: eqx.partition(model, eqx.is_array)) or pass it as a keyword argument of the step"
        )
