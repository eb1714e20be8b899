"""What a shared comm hook is, and what it is given.

A hook is a generator over one bucket: it yields the collectives that it needs and is sent their results, so that one
text serves torch, where a collective is under way while other buckets are packed, and JAX, where it is traced.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from unified_ddp.errors import MisuseError
from unified_ddp.hooks.collectives import Array, Gather, Steps, Sum
from unified_ddp.hooks.ops import Ops

State = dict[str, Any]
"""A hook's memory of one bucket on one rank: arrays by name, or lists of arrays; a pytree to JAX."""


@dataclasses.dataclass(frozen=True)
class BucketLayout:
    """What is in a bucket.

    Attributes:
        index: number of the bucket in the plan.
        dtype: of the gradients, by numpy's or ml_dtypes' name.
        names: of the parameters, in order of storage.
        shapes: of the parameters, with dimensions in the order in which they lie in storage.
    """

    index: int
    dtype: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements of each parameter."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def numel(self) -> int:
        """Number of elements of the bucket."""
        return sum(self.sizes)


@dataclasses.dataclass(frozen=True)
class HookBucket:
    """One bucket of one rank's gradients.

    Attributes:
        layout: what is in it.
        storage: the gradients, shape (numel,), not divided by the number of ranks.
        world_size: number of ranks.
        ops: operations on such arrays.
        wire: dtype in which floating-point numbers are sent where it is narrower than theirs, see `Compressed`.
    """

    layout: BucketLayout
    storage: Array
    world_size: int
    ops: Ops
    wire: str | None = None

    def mean(self, array: Array, dtype: str) -> Steps:
        """Asks for the mean over all ranks of an array of `dtype`, divided before it is sent, as DDP does."""
        total = yield Sum(self.ops.cast(array / self.world_size, self._wire_of(dtype)))
        return self.ops.cast(total, dtype)

    def gather(self, array: Array, dtype: str) -> Steps:
        """Asks for every rank's array of `dtype`, stacked by rank."""
        every = yield Gather(self.ops.cast(array, self._wire_of(dtype)))
        return self.ops.cast(every, dtype)

    def as_averaged(self, array: Array, dtype: str) -> Array:
        """Returns this rank's part in `mean(array)` times the number of ranks: `array` as it is after rounding."""
        if self._wire_of(dtype) == dtype:
            return array
        return self.ops.cast(self.ops.cast(array / self.world_size, self._wire_of(dtype)), dtype) * self.world_size

    def as_gathered(self, array: Array, dtype: str) -> Array:
        """Returns `array` as `gather(array)` hands it to every rank."""
        return self.ops.cast(self.ops.cast(array, self._wire_of(dtype)), dtype)

    def _wire_of(self, dtype: str) -> str:
        narrower = self.wire is not None and dtype in _BITS and _BITS[self.wire] < _BITS[dtype]
        return self.wire if narrower and self.wire is not None else dtype


Held = tuple[BucketLayout, State]
"""A bucket, and what a hook remembers of it."""


class SharedHook(abc.ABC):
    """Reduces one bucket in place of the mean by all-reduce; pure: what it has to remember comes and goes as state."""

    def init(self, layout: BucketLayout) -> State:
        """Returns a bucket's state on one rank before the first step, as numpy arrays; empty if it has none.

        Raises:
            MisuseError: the hook cannot reduce such a bucket.
        """
        return {}

    @abc.abstractmethod
    def __call__(self, state: State, bucket: HookBucket, /) -> Steps:
        """Yields collectives; returns the reduced bucket (as `bucket.storage`) and the state for the next step."""

    def carry(self, ops: Ops, layout: BucketLayout, state: State, sources: Sequence[Held]) -> State:
        """Returns the state of a new bucket after buckets were planned anew.

        Args:
            ops: operations on the states' arrays.
            layout: the new bucket.
            state: its `init`, as the framework's arrays.
            sources: the old buckets with any of its parameters, and their states.
        """
        return state


def work_dtype(layout: BucketLayout, hook: SharedHook) -> str:
    """Returns the dtype in which a lossy hook computes: float32 for narrower gradients, else their own.

    Raises:
        MisuseError: the gradients are no real numbers.
    """
    bits = _BITS.get(layout.dtype)
    if bits is None:
        raise MisuseError(
            f"{type(hook).__name__} reduces real floating-point gradients, but bucket {layout.index} "
            f"({layout.names[0]}, ...) holds {layout.dtype}; use AllReduce for a model with such parameters"
        )
    return layout.dtype if bits > 16 else "float32"


_BITS = {"float16": 16, "bfloat16": 16, "float32": 32, "float64": 64}
