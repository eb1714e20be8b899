"""A user's own reduction of a bucket: a function of it."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import jax

from unified_ddp.errors import MisuseError
from unified_ddp.hooks.protocol import State
from unified_ddp.jax.reduction.axes import replica_count
from unified_ddp.plan import BucketPlan, BucketSpec, ParamSpec
from unified_ddp.ranks.texts import shortened


@dataclasses.dataclass(frozen=True)
class JaxBucket:
    """One bucket of local gradients, as a comm hook gets it at trace time.

    Attributes:
        storage: the gradients of this replica in the order of the plan, shape (numel,). Not divided by the number of
            replicas, as in torch: the hook gives the mean.
        index: number of the bucket in the plan, from 0.
        is_last: whether it is the plan's last bucket.
        axis_name: the mapped axes to reduce over, as given to the collectives of `jax.lax`.
        axis_size: number of replicas, as `jax.lax.axis_size` gives it for these axes.
        parameters: names, in the order of the plan.
        spec: offsets and sizes, in elements.
    """

    storage: jax.Array
    index: int
    is_last: bool
    axis_name: tuple[str, ...]
    axis_size: int
    parameters: tuple[str, ...]
    spec: BucketSpec
    _specs: tuple[ParamSpec, ...] = dataclasses.field(repr=False)

    def gradients(self) -> list[jax.Array]:
        """Returns the bucket's gradients, each in its own shape, in the order of `parameters`."""
        return [
            self.storage[start : start + spec.numel].reshape(spec.shape)
            for start, spec in zip(self.spec.offsets, self._specs, strict=True)
        ]


class CommHook(Protocol):
    """A pure function that reduces one bucket; it is traced once a bucket."""

    def __call__(self, bucket: JaxBucket, /) -> jax.Array:
        """Returns the mean over all replicas, with the shape and dtype of `bucket.storage`."""


class FunctionReducer:
    """Reduces the buckets of a plan by a `CommHook`, which has no state."""

    def __init__(self, hook: CommHook, plan: BucketPlan) -> None:
        self._hook = hook
        self._plan = plan
        self.initial_states: Sequence[State] = [{} for _ in plan.buckets]

    def reduce(self, index: int, storage: jax.Array, state: State, axes: tuple[str, ...]) -> tuple[jax.Array, State]:
        """Returns what the hook makes of a bucket, and the state as it is.

        Raises:
            MisuseError: the result has another shape or dtype than the storage.
        """
        bucket = self._bucket(index, storage, axes)
        reduced = self._hook(bucket)
        want = (storage.shape, storage.dtype)
        if (getattr(reduced, "shape", None), getattr(reduced, "dtype", None)) != want:
            have = jax.typeof(reduced) if isinstance(reduced, jax.Array) else type(reduced).__name__
            raise MisuseError(
                f"the comm hook {getattr(self._hook, '__name__', self._hook)!r} returned {have} for bucket {index} "
                f"({shortened(bucket.parameters, 3)}); return an array of shape {want[0]} and dtype {want[1]}, like "
                "bucket.storage"
            )
        return reduced, state

    def _bucket(self, index: int, storage: jax.Array, axes: tuple[str, ...]) -> JaxBucket:
        bucket = self._plan.buckets[index]
        specs = tuple(self._plan.params[i] for i in bucket.params)
        is_last = index == len(self._plan.buckets) - 1
        names = tuple(spec.name for spec in specs)
        return JaxBucket(storage, index, is_last, axes, replica_count(axes), names, bucket, specs)
