"""Shared comm hooks on known gradients: what each adapter is given, and what the same hook makes of it on the host."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from support.host_ranks import reduce_on_host
from unified_ddp.hooks import AllReduce, Compressed, Noop, PowerSGD, Quantize8, SharedHook, TopK
from unified_ddp.hooks.ops import Ops
from unified_ddp.hooks.protocol import BucketLayout

SHAPES = {
    "conv.kernel": (3, 3, 4, 8),
    "dense1.bias": (20,),
    "dense1.kernel": (12, 20),
    "dense2.kernel": (12, 20),
    "empty": (0, 3),
    "scale": (),
}
STEPS = 5
BUCKET_BYTES = 1500  # two buckets or three

# Each hook with k of "max|difference| <= k max|reference|" in float32, on 2 and on more ranks, as its docstring says.
HOOKS: dict[str, tuple[SharedHook, float, float]] = {
    "noop": (Noop(), 0.0, 0.0),
    "allreduce": (AllReduce(), 0.0, 1e-6),
    "fp16": (Compressed(AllReduce(), "float16"), 0.0, 2e-3),
    "bf16": (Compressed(AllReduce(), "bfloat16"), 0.0, 2e-2),
    "topk": (TopK(ratio=0.1), 0.0, 0.0),
    "topk bf16": (Compressed(TopK(ratio=0.1), "bfloat16"), 0.0, 0.0),
    "quantize8": (Quantize8(block=64), 1e-6, 1e-6),
    "quantize8 late": (Quantize8(block=64, start_step=2), 1e-6, 1e-6),
    "powersgd": (PowerSGD(rank=2), 1e-4, 1e-4),
    "powersgd late": (PowerSGD(rank=2, start_step=2), 1e-4, 1e-4),
    "powersgd cold qr": (PowerSGD(rank=2, warm_start=False, orthogonalization="qr"), 1e-4, 1e-4),
    "powersgd no feedback": (PowerSGD(rank=3, error_feedback=False), 1e-4, 1e-4),
    "powersgd bf16": (Compressed(PowerSGD(rank=2), "bfloat16"), 2e-2, 2e-2),
}


def gradients(step: int, rank: int, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """One rank's gradients in one step: partly the same in all steps, so that warm start and errors matter."""
    same, other = np.random.default_rng(7), np.random.default_rng([step, rank])
    return {
        name: (same.normal(size=shape) + 0.3 * other.normal(size=shape)).astype(dtype) for name, shape in SHAPES.items()
    }


class HostRanks:
    """Runs a hook on the host for all ranks, over buckets that may be planned anew between steps."""

    def __init__(self, hook: SharedHook, size: int) -> None:
        self.hook = hook
        self.size = size
        self._held: list[tuple[BucketLayout, list[Any]]] = []

    def step(
        self, layouts: Sequence[BucketLayout], grads: Sequence[dict[str, np.ndarray]]
    ) -> list[dict[str, np.ndarray]]:
        """Returns every rank's reduced gradients by name."""
        reduced: list[dict[str, np.ndarray]] = [{} for _ in grads]
        held = []
        for layout in layouts:
            buffers = [np.concatenate([grad[name].ravel() for name in layout.names]) for grad in grads]
            results, states = reduce_on_host(self.hook, layout, self._states(layout), buffers)
            held.append((layout, states))
            for into, result in zip(reduced, results, strict=True):
                pieces = np.split(result, np.cumsum(layout.sizes)[:-1])
                into |= {n: p.reshape(s) for n, p, s in zip(layout.names, pieces, layout.shapes, strict=True)}
        self._held = held
        return reduced

    def _states(self, layout: BucketLayout) -> list[Any]:
        sources = [(old, states) for old, states in self._held if set(old.names) & set(layout.names)]
        fresh = [self.hook.init(layout) for _ in range(self.size)]
        return [
            self.hook.carry(Ops(), layout, state, [(old, states[rank]) for old, states in sources])
            for rank, state in enumerate(fresh)
        ]


def assert_close(got: dict[str, Any], want: dict[str, np.ndarray], k: float) -> None:
    """Asserts max|difference| <= k max|wanted| for each parameter."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        have = np.asarray(got[name])
        assert have.shape == value.shape, name
        error = np.max(np.abs(have.astype(np.float64) - value), initial=0.0)
        assert error <= k * np.max(np.abs(value), initial=0.0), (name, error)
