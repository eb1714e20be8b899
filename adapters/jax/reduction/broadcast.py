"""One replica's values for all replicas, bit for bit."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from unified_ddp.jax.pytrees.schema import is_array, is_key
from unified_ddp.jax.reduction.mean import Strategy, all_reduce
from unified_ddp.jax.reduction.packing import Turns


def broadcast(tree: Any, axes: tuple[str, ...], source: int | jax.Array, strategy: Strategy) -> Any:
    """Returns the tree with every array as replica `source` has it, replicated by type.

    The other replicas add zero bits to the source's bits, so NaNs, signed zeros and integers arrive unchanged and
    nothing of the others leaks in. Leaves that are no arrays or numbers are left alone. `source` is the same on all.
    """
    leaves, treedef = jax.tree.flatten(tree)
    arrays = {i: jnp.asarray(leaf) for i, leaf in enumerate(leaves) if is_array(leaf)}
    is_source = lax.axis_index(axes) == source
    sent = [jnp.where(is_source, bits, jnp.zeros_like(bits)) for bits in map(_to_bits, arrays.values())]
    sums = iter(all_reduce([bits for bits in sent if bits.size], axes, strategy, Turns()))
    for (i, array), bits in zip(arrays.items(), sent, strict=True):
        # Of what is empty, there is nothing to send; on CPUs jax 0.11.2 crashed compiling it.
        leaves[i] = _from_bits(next(sums) if bits.size else jnp.zeros(bits.shape, bits.dtype), array)
    return jax.tree.unflatten(treedef, leaves)


def _to_bits(array: jax.Array) -> jax.Array:
    """The bits as unsigned integers of 32 or 64 bits: collectives of narrower ones are not supported everywhere."""
    dtype = array.dtype
    if is_key(array):
        return _to_bits(jax.random.key_data(array))
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return _to_bits(jnp.stack([array.real, array.imag]))
    if dtype == jnp.bool_:
        return array.astype(jnp.uint32)
    bits = lax.bitcast_convert_type(array, _unsigned(dtype))
    return bits if bits.dtype.itemsize >= 4 else bits.astype(jnp.uint32)


def _from_bits(bits: jax.Array, like: jax.Array) -> jax.Array:
    dtype = like.dtype
    if is_key(like):
        data = jax.random.key_data(like)
        return jax.random.wrap_key_data(_from_bits(bits, data), impl=jax.random.key_impl(like))
    if jnp.issubdtype(dtype, jnp.complexfloating):
        parts = _from_bits(bits, jnp.stack([like.real, like.imag]))
        return lax.complex(parts[0], parts[1])
    if dtype == jnp.bool_:
        return bits.astype(jnp.bool_)
    return lax.bitcast_convert_type(bits.astype(_unsigned(dtype)), dtype)


def _unsigned(dtype: Any) -> Any:
    info = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
    return jnp.dtype(f"uint{info(dtype).bits}")
