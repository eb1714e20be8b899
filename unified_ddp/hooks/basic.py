"""Hooks without memory: nothing, the mean, and the mean in another dtype."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from unified_ddp.hooks.collectives import Steps
from unified_ddp.hooks.ops import Ops
from unified_ddp.hooks.protocol import BucketLayout, Held, HookBucket, SharedHook, State


@dataclasses.dataclass(frozen=True)
class Noop(SharedHook):
    """Leaves gradients local, to measure what communication costs. Both adapters give the same bits.

    In JAX the result varies over the axis by type.
    """

    def __call__(self, state: State, bucket: HookBucket, /) -> Steps:
        """Returns the bucket as it is, and asks for nothing."""
        yield from ()  # a generator, as every hook
        return bucket.storage, state


@dataclasses.dataclass(frozen=True)
class AllReduce(SharedHook):
    """The mean by all-reduce, as without a hook. Both adapters give the same bits on 2 ranks; on more, where sums are
    added in another order, max|difference| <= 1e-6 max|mean| in float32.
    """

    def __call__(self, state: State, bucket: HookBucket, /) -> Steps:
        """Returns the mean of the bucket."""
        mean = yield from bucket.mean(bucket.storage, bucket.layout.dtype)
        return mean, state


@dataclasses.dataclass(frozen=True)
class Compressed(SharedHook):
    """Sends what another hook sends in half precision: `Compressed(AllReduce(), "bfloat16")`, or around PowerSGD.

    Only what is sent is narrowed, not the inner hook's arithmetic or state, and an inner hook with error feedback
    counts the rounding as error. Sums are added in the narrow dtype, of numbers divided by the number of ranks; in
    float16, those beyond 65504 become infinite. On CPU, XLA adds and sends bfloat16 as float32, which saves nothing.

    Both adapters give the same bits on 2 ranks; on more, max|difference| <= k max|mean| with k = 2e-2 in bfloat16 and
    2e-3 in float16.

    Args:
        inner: the hook that reduces.
        dtype: in which floating-point numbers wider than it are sent.
    """

    inner: SharedHook
    dtype: Literal["float16", "bfloat16"]

    def __post_init__(self) -> None:
        if self.dtype not in ("float16", "bfloat16"):
            raise ValueError(f"Compressed takes the dtype 'float16' or 'bfloat16', not {self.dtype!r}")

    def init(self, layout: BucketLayout) -> State:
        """Returns the inner hook's state."""
        return self.inner.init(layout)

    def __call__(self, state: State, bucket: HookBucket, /) -> Steps:
        """Returns what the inner hook returns."""
        return (yield from self.inner(state, dataclasses.replace(bucket, wire=self.dtype)))

    def carry(self, ops: Ops, layout: BucketLayout, state: State, sources: Sequence[Held]) -> State:
        """Carries the inner hook's state."""
        return self.inner.carry(ops, layout, state, sources)
