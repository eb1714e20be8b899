"""One bucket, its gradients and states, and lossy hooks to reduce it on the host."""

from typing import Any

import numpy as np

from unified_ddp.hooks import BucketLayout, LossyHook, PowerSGD, Quantize8, SharedHook, TopK

LAYOUT = BucketLayout(0, "float64", ("bias", "kernel", "empty", "scale"), ((10,), (12, 20), (0, 3), ()))
LOSSY: dict[str, LossyHook] = {
    "topk": TopK(ratio=0.05),
    "quantize8": Quantize8(block=32),
    "powersgd": PowerSGD(rank=2),
    "powersgd qr cold": PowerSGD(rank=2, orthogonalization="qr", warm_start=False),
    "powersgd late": PowerSGD(rank=1, start_step=3),
}


def buffers(step: int, size: int = 3, layout: BucketLayout = LAYOUT) -> list[np.ndarray]:
    return [np.random.default_rng([step, rank]).normal(size=layout.numel).astype(layout.dtype) for rank in range(size)]


def start(hook: SharedHook, size: int = 3, layout: BucketLayout = LAYOUT) -> list[Any]:
    return [hook.init(layout) for _ in range(size)]
