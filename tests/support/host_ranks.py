"""A hook's ranks on the host, with numpy, one after the other in one process."""

from collections.abc import Sequence
from typing import Any

import ml_dtypes  # makes bfloat16 known to numpy
import numpy as np

from unified_ddp.hooks.collectives import Steps, Sum
from unified_ddp.hooks.ops import Ops
from unified_ddp.hooks.protocol import BucketLayout, HookBucket, SharedHook, State

assert ml_dtypes


def reduce_on_host(
    hook: SharedHook, layout: BucketLayout, states: Sequence[State], buffers: Sequence[np.ndarray]
) -> tuple[list[np.ndarray], list[State]]:
    """Returns every rank's reduced bucket and new state, given every rank's state and gradients.

    Sums are added in the order of ranks, in the dtype in which they are sent.

    Raises:
        RuntimeError: the ranks ask for different collectives.
    """
    world_size = len(buffers)
    running: list[Steps] = [
        hook(state, HookBucket(layout, buffer, world_size, Ops()))
        for state, buffer in zip(states, buffers, strict=True)
    ]
    answers: list[Any] = [None] * world_size
    while True:
        requests, ended = [], []
        for steps, answer in zip(running, answers, strict=True):
            try:
                with np.errstate(over="ignore"):
                    requests.append(steps.send(answer))
            except StopIteration as stop:
                ended.append(stop.value)
        if len(ended) == world_size:
            return [reduced for reduced, _ in ended], [state for _, state in ended]
        if len({(type(r), r.array.shape, r.array.dtype) for r in requests}) != 1 or ended:
            raise RuntimeError(f"the ranks' hooks {hook} ask for different collectives: {requests}")
        answers = [_answer(requests)] * world_size


def _answer(requests: Sequence[Any]) -> np.ndarray:
    arrays = [request.array for request in requests]
    if not isinstance(requests[0], Sum):
        return np.stack(arrays)
    total = arrays[0].copy()
    for array in arrays[1:]:
        total = total + array
    return total
