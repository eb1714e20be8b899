"""Top-k sparsification: the largest numbers of a bucket are sent, with their places."""

import dataclasses
import math

from unified_ddp.hooks.collectives import Array, Steps
from unified_ddp.hooks.lossy import LossyHook
from unified_ddp.hooks.protocol import HookBucket, State


@dataclasses.dataclass(frozen=True)
class TopK(LossyHook):
    """Each rank sends the `ratio` of its bucket's elements that are largest in magnitude (Stich et al., 2018,
    arXiv:1809.07599). With one number sent for each index, all ranks receive 2 ratio ranks times the bucket.

    Both adapters give the same bits from the same gradients: contributions are added in the order of ranks, and of
    equal magnitudes the first is sent.

    Args:
        ratio: of the elements sent, above 0 and at most 1; at least one element is.
        error_feedback, start_step: see `LossyHook`.
    """

    ratio: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.ratio <= 1:
            raise ValueError(f"TopK takes a ratio above 0 and at most 1, not {self.ratio!r}")

    def compress(self, state: State, bucket: HookBucket, value: Array, dtype: str) -> Steps:
        """Gathers values and indices."""
        ops, count = bucket.ops, bucket.layout.numel
        if count == 0:
            return value, value, state
        # What is not finite goes first, so that it is seen.
        magnitude = ops.where(value == value, abs(value), math.inf)
        indices = ops.top_k(magnitude, math.ceil(self.ratio * count))
        values = value[indices]
        every_value = yield from bucket.gather(values, dtype)
        every_index = yield from bucket.gather(indices, "int32")
        mean = ops.scatter_add(ops.zeros(count, dtype), every_index, every_value / bucket.world_size)
        sent = ops.scatter_add(ops.zeros(count, dtype), indices[None], bucket.as_gathered(values, dtype)[None])
        return mean, sent, state
