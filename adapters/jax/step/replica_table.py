"""What the replicas tell each other at the start of a step: the weights of their rows, and what they were given."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from unified_ddp.jax.reduction.axes import replica_count
from unified_ddp.jax.step.options import StepOptions


@dataclasses.dataclass(frozen=True)
class ReplicaTable:
    """One row a replica, known to all.

    Attributes:
        axes: the mapped axes that replicas are numbered along.
        differ: for each word that the replicas told, whether some told another one.
        weights: the sum of each replica's weights, shape (replicas,); None if there are none.
    """

    axes: tuple[str, ...]
    differ: jax.Array
    weights: jax.Array | None

    @classmethod
    def gather(cls, axes: tuple[str, ...], words: Sequence[Any], weight: Any) -> "ReplicaTable":
        """Gathers int32 words and weights in one small all-reduce: across processes, the first one of every step."""
        own = jnp.float32(0) if weight is None else jnp.sum(weight.astype(jnp.result_type(float)))
        bits = lax.bitcast_convert_type(own, jnp.int32).reshape(-1)
        row = jnp.concatenate([jnp.asarray(word, jnp.int32).reshape(1) for word in words] + [bits])
        table = jnp.zeros((replica_count(axes), len(row)), jnp.int32).at[lax.axis_index(axes)].set(row)
        if words or weight is not None:
            table = lax.psum(table, axes)
        told, every_bits = table[:, : len(words)], table[:, len(words) :]
        every_bits = every_bits.reshape(-1, *([2] if own.dtype.itemsize == 8 else []))
        weights = None if weight is None else lax.bitcast_convert_type(every_bits, own.dtype)
        return cls(axes, jnp.any(told != told[:1], axis=0), weights)

    @property
    def active(self) -> jax.Array:
        """Which replicas have any weight, or rows at all: shape (replicas,)."""
        return jnp.ones(replica_count(self.axes), bool) if self.weights is None else self.weights > 0

    def scale(self, options: StepOptions) -> Any:
        """Returns the factor on the sum (without weights, on the mean) of each microbatch's losses on this replica.

        With it, the mean over replicas of the sum over microbatches is what `options.reduction` asks for.
        """
        if self.weights is None:
            return 1 / options.accumulate
        own, replicas = self.weights[lax.axis_index(self.axes)], len(self.weights)
        if options.reduction == "weighted_mean":
            return replicas * _inverse(jnp.sum(self.weights))
        if options.divide_by_initial_world_size:
            return _inverse(own)
        return replicas * _inverse(own) * _inverse(jnp.sum(self.active.astype(own.dtype)))


def _inverse(value: jax.Array) -> jax.Array:
    return jnp.where(value > 0, 1 / jnp.where(value > 0, value, 1), 0)
