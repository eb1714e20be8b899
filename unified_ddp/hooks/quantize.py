"""8-bit quantisation: each block of a bucket is sent as signed bytes and one scale."""

import dataclasses

from unified_ddp.hooks.collectives import Array, Steps
from unified_ddp.hooks.lossy import LossyHook
from unified_ddp.hooks.protocol import HookBucket, State


@dataclasses.dataclass(frozen=True)
class Quantize8(LossyHook):
    """Each rank sends its gradients as signed bytes, in steps of 1/127 of the largest magnitude of their block.

    All ranks receive (1 + 4 / block) bytes an element from each rank, which is less than a float32 all-reduce sends on
    up to about 8 ranks. A block with an element that is not finite is NaN for everyone.

    Both adapters give the same bytes from the same gradients, and max|difference| <= 1e-6 max|mean| in float32. From
    gradients that differ by rounding, single elements may differ by one step, which error feedback makes up for.

    Args:
        block: number of elements that share a scale.
        error_feedback, start_step: see `LossyHook`.
    """

    block: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block < 1:
            raise ValueError(f"Quantize8 takes a block of 1 or more elements, not {self.block!r}")

    def compress(self, state: State, bucket: HookBucket, value: Array, dtype: str) -> Steps:
        """Gathers bytes and scales."""
        ops, count = bucket.ops, bucket.layout.numel
        if count == 0:
            return value, value, state
        padding = ops.zeros(-count % self.block, dtype)
        blocks = ops.concat([value, padding]).reshape((-1, self.block))
        # Rounded as it will be sent before it is used, so that all ranks and the error know one scale.
        scale = bucket.as_gathered(ops.amax(abs(blocks)) / 127, dtype)
        usable = (scale > 0) & (scale - scale == 0)
        steps = ops.where(usable, ops.round(blocks / ops.where(usable, scale, 1.0)), 0.0)
        # A scale rounded down would give steps beyond 127.
        steps = ops.cast(ops.where(steps > 127, 127.0, ops.where(steps < -127, -127.0, steps)), "int8")
        every_step = yield from bucket.gather(steps, "int8")
        every_scale = yield from bucket.gather(scale, dtype)
        mean = (ops.cast(every_step, dtype) * (every_scale / bucket.world_size)).sum(0)
        sent = ops.cast(steps, dtype) * scale
        return mean.reshape((-1,))[:count], sent.reshape((-1,))[:count], state
