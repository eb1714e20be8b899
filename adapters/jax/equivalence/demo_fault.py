"""A JAX comm hook that reduces one bucket wrongly."""

import jax
import jax.numpy as jnp
from jax import lax

from unified_ddp.equivalence.demo.config import Fault, VerifyConfig
from unified_ddp.jax import JaxBucket

__all__ = ["FaultyAllReduce"]


class FaultyAllReduce:
    """The hook: averages every bucket as the adapter does, except the one at fault.

    Attributes:
        previous: the previous step's local gradients by name, set inside the mapped function while it is traced, since
            a pure hook remembers nothing.
    """

    def __init__(self, config: VerifyConfig) -> None:
        self.config = config
        self.previous: dict[str, jax.Array] = {}

    def __call__(self, bucket: JaxBucket) -> jax.Array:
        """Reduces one bucket."""
        local = bucket.storage
        if bucket.index == self.config.inject_bucket:
            if self.config.inject is Fault.SKIP_BUCKET:
                return local
            if self.config.inject is Fault.SUM:
                return lax.psum(local, bucket.axis_name)
            if self.config.inject is Fault.STALE_RANK:
                stale = jnp.concatenate([self.previous[name].ravel() for name in bucket.parameters])
                at_fault = lax.axis_index(bucket.axis_name) == self.config.rank_at_fault
                local = jnp.where(at_fault, stale, local)
        return lax.psum(local / bucket.axis_size, bucket.axis_name)
