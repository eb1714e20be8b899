"""What the tests of the JAX adapter share: a small model, the oracle, and the ways to map a function over replicas."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

MAPPINGS = ("checked", "unchecked", "pmap", "vmap")
TOLERANCE = {"float64": 1e-13, "float32": 1e-5, "complex64": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}


@dataclasses.dataclass(frozen=True)
class Replicas:
    """Runs a function once a replica: "checked" and "unchecked" are shard_map with check_vma True and False."""

    mapping: str
    size: int
    axis: str = "data"

    def __call__(self, fn: Callable[..., Any], shared: Any, split: Any, *, local: bool = False) -> Any:
        """Returns the results of fn(shared, split[i]) with a leading replica axis, as numpy arrays.

        Args:
            fn: the function of one replica.
            shared: a pytree that every replica gets as it is.
            split: a pytree of arrays whose first axis is divided evenly over the replicas.
            local: whether results may differ by replica. If not, they must be replicated where types say so.
        """
        if self.mapping in ("checked", "unchecked"):
            result = self.shard_mapped(fn, local=local)(shared, split)
        else:
            pieces = jax.tree.map(lambda x: jnp.reshape(x, (self.size, -1, *x.shape[1:])), split)
            if self.mapping == "pmap":
                devices = jax.devices("cpu")[: self.size]
                # Closed over: if there are two leaves, pmap of jax 0.10 mistakes in_axes=(None, 0) for one axis a leaf.
                one = functools.partial(fn, shared)
                result = jax.pmap(one, axis_name=self.axis, devices=devices)(pieces)
            else:
                result = jax.jit(jax.vmap(fn, axis_name=self.axis, in_axes=(None, 0)))(shared, pieces)
        jax.block_until_ready(result)
        by_shard = self.mapping in ("checked", "unchecked") and not local
        return jax.tree.map(_by_shard if by_shard else np.asarray, result)

    def shard_mapped(self, fn: Callable[..., Any], *, local: bool = False) -> Any:
        """Returns the jitted function under shard_map, to run or to lower."""

        def stacked(shared: Any, split: Any) -> Any:
            result = fn(shared, split)
            return jax.tree.map(lambda x: jnp.asarray(x)[None], result) if local else result

        return jax.jit(
            jax.shard_map(
                stacked,
                mesh=mesh(self.size, self.axis),
                in_specs=(P(), P(self.axis)),
                out_specs=P(self.axis) if local else P(),
                check_vma=self.mapping == "checked",
            )
        )


def mesh(*sizes_and_axes: Any) -> Mesh:
    """Returns a mesh of CPU devices, given sizes and axis names in turn."""
    sizes, axes = sizes_and_axes[::2], sizes_and_axes[1::2]
    devices = np.array(jax.devices("cpu")[: int(np.prod(sizes))]).reshape(sizes)
    return Mesh(devices, axes, axis_types=(AxisType.Auto,) * len(axes))


def _by_shard(array: jax.Array) -> np.ndarray:
    # Where types are not checked, "replicated" results may differ by device: look at each one.
    return np.stack([np.asarray(shard.data) for shard in array.addressable_shards])


def make_params(dtype: Any = np.float32) -> dict[str, Any]:
    """Three layers, a scalar, an empty leaf, and a parameter that the loss does not use."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(np.asarray(random.normal(size=shape)).astype(dtype))

    return {
        "dense1": {"kernel": normal(3, 5), "bias": normal(5)},
        "dense2": {"kernel": normal(5, 4), "bias": normal(4)},
        "head": {"kernel": normal(4, 1)},
        "scale": normal(),
        "empty": normal(0, 3),
        "unused": normal(7),
    }


def make_batch(size: int = 8, dtype: Any = np.float32) -> dict[str, jax.Array]:
    random = np.random.default_rng(1)
    x = random.normal(size=(size, 3)) * np.arange(1, size + 1)[:, None]  # shards differ much
    return {"x": jnp.asarray(x.astype(dtype)), "y": jnp.asarray(random.normal(size=(size, 1)).astype(dtype))}


def loss_fn(params: Any, batch: Any) -> jax.Array:
    hidden = jnp.tanh(batch["x"] @ params["dense1"]["kernel"] + params["dense1"]["bias"])
    hidden = jnp.tanh(hidden @ params["dense2"]["kernel"] + params["dense2"]["bias"])
    return jnp.mean((params["scale"] * (hidden @ params["head"]["kernel"]) - batch["y"]) ** 2)


def shards(batch: Any, size: int) -> list[Any]:
    return [jax.tree.map(lambda x, i=i: np.asarray(x).reshape(size, -1, *x.shape[1:])[i], batch) for i in range(size)]


def oracle(loss: Callable[..., Any], params: Any, batch: Any, size: int) -> Any:
    """The mean over replicas of the gradients of plain jax.grad, outside any mapping."""
    return mean_of([_grad(loss)(params, shard) for shard in shards(batch, size)])


@functools.cache  # compiled once for all tests of one loss
def _grad(loss: Callable[..., Any]) -> Any:
    return jax.jit(jax.grad(loss))


def mean_of(trees: list[Any]) -> Any:
    def mean(*leaves: Any) -> np.ndarray:
        wide = np.complex128 if jnp.issubdtype(leaves[0].dtype, jnp.complexfloating) else np.float64
        return np.mean([np.asarray(leaf).astype(wide) for leaf in leaves], axis=0)

    return jax.tree.map(mean, *trees)


def assert_all_close(results: Any, want: Any, tolerance: float | None = None) -> None:
    """Asserts that every replica's result (leading axis) is the wanted one, per tensor, in its own dtype."""
    assert jax.tree.structure(results) == jax.tree.structure(want)
    for (path, got), ref in zip(jax.tree_util.tree_leaves_with_path(results), jax.tree.leaves(want), strict=True):
        bound = tolerance or TOLERANCE[str(got.dtype)]
        assert got.shape[1:] == ref.shape, path
        for replica, value in enumerate(got):
            error = np.max(np.abs(value.astype(ref.dtype) - ref), initial=0.0)
            assert error <= bound * np.max(np.abs(ref), initial=0.0), (jax.tree_util.keystr(path), replica, error)
