"""Weights that test something: zero biases, unit scales and zero-initialised layers would hide faults."""

import math

import numpy as np

from unified_ddp.equivalence.side import Arrays, TensorInfo

_STATISTICS = ("running_mean", "running_var", "mean", "var")
_STEP = 0.1


def scrambled(values: Arrays, tensors: tuple[TensorInfo, ...], seed: int) -> Arrays:
    """Returns the values moved by seeded noise of their own scale; what is positive stays so.

    Buffers other than running statistics are constants that the program may rely on, such as rotary frequencies, and
    stay.

    Args:
        values: by name.
        tensors: of the side.
        seed: of the noise.
    """
    random = np.random.default_rng(seed)
    buffers = {t.name for t in tensors if t.buffer and t.key not in _STATISTICS}
    return {name: array if name in buffers else _moved(array, random) for name, array in values.items()}


def _moved(array: np.ndarray, random: np.random.Generator) -> np.ndarray:
    noise = random.standard_normal(array.shape)
    if array.dtype.kind == "c":
        noise = noise + 1j * random.standard_normal(array.shape)
        return (array + _scale(array) * noise).astype(array.dtype)
    wide = array.astype(np.float64)
    if array.size and (wide > 0).all():
        return (wide * np.exp(_STEP * noise)).astype(array.dtype)
    return (wide + _scale(wide) * noise).astype(array.dtype)


def _scale(array: np.ndarray) -> float:
    """Noise on random numbers is a share of their spread; on constants it is as weights are initialised."""
    spread = float(np.std(array)) if array.size else 0.0
    if spread:
        return 0.3 * spread
    fan_in = math.prod(array.shape[1:]) if array.ndim > 1 else 1
    return min(_STEP, 1 / math.sqrt(fan_in))
