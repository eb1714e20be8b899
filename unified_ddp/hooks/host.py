"""Hooks on the host, with numpy: the arithmetic of the adapters' ranks, one after the other, in one process."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unified_ddp.hooks.protocol import Array, BucketLayout, HookBucket, SharedHook, State, Steps, Sum

__all__ = ["NumpyOps", "numpy_dtype", "reduce_on_host"]


def numpy_dtype(name: str) -> np.dtype:
    """Returns the dtype of a name; bfloat16 needs ml_dtypes."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


class NumpyOps:
    """Implements `unified_ddp.hooks.protocol.Ops`."""

    sqrt = staticmethod(np.sqrt)
    log = staticmethod(np.log)
    cos = staticmethod(np.cos)
    round = staticmethod(np.round)
    matmul = staticmethod(np.matmul)
    where = staticmethod(np.where)
    stack = staticmethod(np.stack)

    def from_numpy(self, array: np.ndarray) -> Array:
        """Returns the array."""
        return array

    def cast(self, array: Array, dtype: str) -> Array:
        """Returns the array in a dtype."""
        with np.errstate(over="ignore"):
            return np.asarray(array).astype(numpy_dtype(dtype))

    def zeros(self, count: int, dtype: str) -> Array:
        """Returns zeros."""
        return np.zeros(count, numpy_dtype(dtype))

    def concat(self, arrays: Sequence[Array], axis: int = 0) -> Array:
        """Joins arrays along an axis."""
        return np.concatenate(arrays, axis)

    def split(self, flat: Array, sizes: Sequence[int]) -> list[Array]:
        """Returns the pieces of a flat array."""
        return np.split(flat, np.cumsum(sizes)[:-1])

    def amax(self, array: Array) -> Array:
        """Returns the maximum along the last axis."""
        return np.max(array, axis=-1, keepdims=True)

    def qr(self, matrices: Array) -> Array:
        """Returns the orthonormal factors."""
        return np.linalg.qr(matrices).Q

    def top_k(self, array: Array, k: int) -> Array:
        """Returns the indices of the largest."""
        return np.argsort(-array, kind="stable")[:k].astype(np.int32)

    def scatter_sum(self, count: int, indices: Array, values: Array) -> Array:
        """Adds values at indices, rank by rank."""
        total = np.zeros(count, values.dtype)
        for places, added in zip(indices, values, strict=True):
            total[places] += added
        return total

    def branch(self, condition: Array, yes: Callable[[], Steps], no: Callable[[], Steps]) -> Steps:
        """Runs one of two."""
        return (yield from (yes if condition else no)())


def reduce_on_host(
    hook: SharedHook, layout: BucketLayout, states: Sequence[State], buffers: Sequence[np.ndarray]
) -> tuple[list[np.ndarray], list[State]]:
    """Returns every rank's reduced bucket and new state, given every rank's state and gradients.

    Sums are added in the order of ranks, in the dtype in which they are sent.

    Raises:
        RuntimeError: the ranks ask for different collectives.
    """
    size = len(buffers)
    running: list[Steps] = [
        hook(state, HookBucket(layout, buffer, size, NumpyOps())) for state, buffer in zip(states, buffers, strict=True)
    ]
    answers: list[Any] = [None] * size
    while True:
        requests, ended = [], []
        for steps, answer in zip(running, answers, strict=True):
            try:
                requests.append(steps.send(answer))
            except StopIteration as stop:
                ended.append(stop.value)
        if len(ended) == size:
            return [reduced for reduced, _ in ended], [state for _, state in ended]
        if len({(type(r), r.array.shape, r.array.dtype) for r in requests}) != 1 or ended:
            raise RuntimeError(f"the ranks' hooks {hook} ask for different collectives: {requests}")
        answers = [_answer(requests)] * size


def _answer(requests: Sequence[Any]) -> np.ndarray:
    arrays = [request.array for request in requests]
    if not isinstance(requests[0], Sum):
        return np.stack(arrays)
    total = arrays[0].copy()
    for array in arrays[1:]:
        total = total + array
    return total
