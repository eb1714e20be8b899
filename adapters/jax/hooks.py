"""Comm hooks: a user's own reduction of a bucket."""

import dataclasses
from typing import Protocol

import jax

from unified_ddp.errors import MisuseError
from unified_ddp.plan import BucketSpec, ParamSpec
from unified_ddp.ranks.texts import shortened

__all__ = ["CommHook", "JaxBucket", "run_hook"]


@dataclasses.dataclass(frozen=True)
class JaxBucket:
    """One bucket of local gradients, as a comm hook gets it at trace time.

    Attributes:
        buffer: the gradients of this replica in the order of the plan, shape (numel,). Not divided by the number of
            replicas, as in torch: the hook gives the mean.
        index: number of the bucket in the plan, from 0.
        is_last: whether it is the plan's last bucket.
        axis_name: the mapped axes to reduce over, as given to the collectives of `jax.lax`.
        axis_size: number of replicas.
        parameters: names, in the order of the plan.
        spec: offsets and sizes, in elements.
    """

    buffer: jax.Array
    index: int
    is_last: bool
    axis_name: tuple[str, ...]
    axis_size: int
    parameters: tuple[str, ...]
    spec: BucketSpec
    _specs: tuple[ParamSpec, ...] = dataclasses.field(repr=False)

    def gradients(self) -> list[jax.Array]:
        """Returns the bucket's gradients, each in its own shape, in the order of `parameters`."""
        ends = (offset + spec.numel for offset, spec in zip(self.spec.offsets, self._specs, strict=True))
        return [
            self.buffer[start:end].reshape(spec.shape)
            for start, end, spec in zip(self.spec.offsets, ends, self._specs, strict=True)
        ]


class CommHook(Protocol):
    """A pure function that reduces one bucket; it is traced once a bucket."""

    def __call__(self, bucket: JaxBucket, /) -> jax.Array:
        """Returns the mean over all replicas, with the shape and dtype of `bucket.buffer`."""


def run_hook(hook: CommHook, bucket: JaxBucket) -> jax.Array:
    """Returns what the hook makes of the bucket.

    Raises:
        MisuseError: the result has another shape or dtype than `bucket.buffer`.
    """
    reduced = hook(bucket)
    want = (bucket.buffer.shape, bucket.buffer.dtype)
    if (getattr(reduced, "shape", None), getattr(reduced, "dtype", None)) != want:
        have = jax.typeof(reduced) if isinstance(reduced, jax.Array) else type(reduced).__name__
        raise MisuseError(
            f"the comm hook {getattr(hook, '__name__', hook)!r} returned {have} for bucket {bucket.index} "
            f"({shortened(bucket.parameters, 3)}); return an array of shape {want[0]} and dtype {want[1]}, like "
            "bucket.buffer"
        )
    return reduced
