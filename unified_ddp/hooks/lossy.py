"""What lossy hooks share: error feedback, a start after some steps of plain mean, a step counter."""

import abc
import dataclasses
from collections.abc import Sequence

import numpy as np

from unified_ddp.hooks.collectives import Array, Steps
from unified_ddp.hooks.ops import Ops
from unified_ddp.hooks.protocol import BucketLayout, Held, HookBucket, SharedHook, State, work_dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossyHook(SharedHook):
    """Sends a part of each gradient, and adds what it did not send to the next one (error feedback).

    On each rank and in each step, sent + error = gradient + error before, to one rounding; and the result is the mean
    over ranks of what they sent. The sum of all results over time hence differs from the sum of all mean gradients by
    the mean of the errors held, and by nothing else. An element that is not finite is not held: its error is zero.

    Args:
        error_feedback: whether what was not sent is kept (one number an element, in float32 at least).
        start_step: number of first steps that reduce by the plain mean; the others begin with no error.
    """

    error_feedback: bool = True
    start_step: int = 0

    def __post_init__(self) -> None:
        if self.start_step < 0:
            raise ValueError(f"start_step takes a number of steps from 0, not {self.start_step!r}")

    @abc.abstractmethod
    def compress(self, state: State, bucket: HookBucket, value: Array, dtype: str) -> Steps:
        """Yields collectives; returns the mean over ranks of what they send, what this rank sends, and the state.

        Args:
            state: of the bucket.
            bucket: gives the layout, collectives and operations.
            value: the gradients and the error held, shape (numel,).
            dtype: of `value`.
        """

    @property
    def counts_steps(self) -> bool:
        """Whether the state holds the number of steps made."""
        return self.start_step > 0

    def init(self, layout: BucketLayout) -> State:
        """Returns a state without error."""
        dtype = work_dtype(layout, self)
        state: State = {"error": np.zeros(layout.numel, dtype)} if self.error_feedback else {}
        return state | ({"step": np.zeros((), np.int32)} if self.counts_steps else {})

    def __call__(self, state: State, bucket: HookBucket, /) -> Steps:
        """Returns the mean of what all ranks send."""
        if self.start_step:
            compressed, mean = (lambda: self._compressed(state, bucket)), (lambda: self._mean(state, bucket))
            reduced, after = yield from bucket.ops.branch(state["step"] >= self.start_step, compressed, mean)
        else:
            reduced, after = yield from self._compressed(state, bucket)
        return reduced, (after | {"step": state["step"] + 1} if self.counts_steps else after)

    def _mean(self, state: State, bucket: HookBucket) -> Steps:
        mean = yield from bucket.mean(bucket.storage, bucket.layout.dtype)
        return mean, state

    def _compressed(self, state: State, bucket: HookBucket) -> Steps:
        ops, dtype = bucket.ops, work_dtype(bucket.layout, self)
        value = ops.cast(bucket.storage, dtype)
        if self.error_feedback:
            value = value + state["error"]
        mean, sent, state = yield from self.compress(state, bucket, value, dtype)
        if self.error_feedback:
            error = value - sent
            finite = error - error == 0  # not so of infinity and NaN
            state = state | {"error": ops.where(finite, error, 0.0)}
        return ops.cast(mean, bucket.layout.dtype), state

    def carry(self, ops: Ops, layout: BucketLayout, state: State, sources: Sequence[Held]) -> State:
        """Takes errors by parameter, and the number of steps."""
        carried = dict(state)
        if self.counts_steps and sources:
            carried["step"] = sources[0][1]["step"]
        if self.error_feedback:
            parts = dict(zip(layout.names, ops.split(state["error"], layout.sizes), strict=True))
            for old, held in sources:
                errors = zip(old.names, ops.split(held["error"], old.sizes), strict=True)
                parts |= {name: error for name, error in errors if name in parts}
            carried["error"] = ops.concat(list(parts.values()))
        return carried
