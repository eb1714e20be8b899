"""A user's own reduction of a bucket: a function of it."""

import dataclasses
from typing import Protocol

import jax

from unified_ddp.errors import MisuseError
from unified_ddp.hooks.collectives import Steps
from unified_ddp.hooks.protocol import HookBucket, SharedHook, State
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


@dataclasses.dataclass(frozen=True)
class FunctionHook(SharedHook):
    """A `CommHook` as a hook without state, which does its collectives by itself."""

    function: CommHook
    plan: BucketPlan
    axes: tuple[str, ...]

    def __call__(self, state: State, bucket: HookBucket, /) -> Steps:
        """Returns what the function makes of a bucket.

        Raises:
            MisuseError: that has another shape or dtype than the storage.
        """
        layout, storage = bucket.layout, bucket.storage
        spec = self.plan.buckets[layout.index]
        is_last = layout.index == len(self.plan.buckets) - 1
        params = tuple(self.plan.params[i] for i in spec.params)
        given = JaxBucket(storage, layout.index, is_last, self.axes, bucket.world_size, layout.names, spec, params)
        reduced = self.function(given)
        want = (storage.shape, storage.dtype)
        if (getattr(reduced, "shape", None), getattr(reduced, "dtype", None)) != want:
            have = jax.typeof(reduced) if isinstance(reduced, jax.Array) else type(reduced).__name__
            raise MisuseError(
                f"the comm hook {getattr(self.function, '__name__', self.function)!r} returned {have} for bucket "
                f"{layout.index} ({shortened(layout.names, 3)}); return an array of shape {want[0]} and dtype "
                f"{want[1]}, like bucket.storage"
            )
        yield from ()  # a generator, as hooks are
        return reduced, state
