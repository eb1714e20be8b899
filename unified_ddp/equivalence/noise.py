"""How much rounding alone moves a side: it is run again on inputs and weights that differ by less than anyone means.

In the dtype asked for, inputs and weights are moved by one ULP and the batch is permuted; what changes is noise. In
float64, whose job is to tell programs apart, the answer to the movement itself is taken off: in
f(x + d) + f(x - d) - 2 f(x) the linear part cancels, and what is left is rounding, wherever the program rounds. A side
that computes in float32 somewhere inside shows it so, without anyone looking for casts.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from unified_ddp.equivalence.batches import map_arrays
from unified_ddp.equivalence.side import Arrays

ROUNDING_MOVE = 2.0**-20
"""Relative movement whose square is lost in float64 beside what a careless program loses in float32."""

_ROW = 8
"""A row with fewer elements says too little of its own noise."""


def jitter(values: Arrays, seed: int) -> Arrays:
    """Returns floating-point arrays with every element moved to the next or the previous number, or left, at random."""
    random = np.random.default_rng(seed)
    return {name: _one_ulp(array, random) for name, array in values.items()}


def jitter_batch(batch: Any, seed: int) -> Any:
    """Returns a batch with its floating-point arrays moved as by `jitter`."""
    random = np.random.default_rng(seed)
    return map_arrays(lambda array: _one_ulp(np.asarray(array), random), batch)


def moved(values: Arrays, seed: int, sign: int) -> Arrays:
    """Returns floating-point arrays times (1 + sign * ROUNDING_MOVE * u), u uniform in [-1, 1] and of the seed."""
    random = np.random.default_rng(seed)
    return {name: _moved(array, random, sign) for name, array in values.items()}


def moved_batch(batch: Any, seed: int, sign: int) -> Any:
    """Returns a batch moved as by `moved`."""
    random = np.random.default_rng(seed)
    return map_arrays(lambda array: _moved(np.asarray(array), random, sign), batch)


def second_difference(plus: np.ndarray, minus: np.ndarray, middle: np.ndarray) -> np.ndarray:
    """Returns what of f(x + d), f(x - d) and f(x) is not linear, scaled to the rounding of one of them."""
    with np.errstate(all="ignore"):
        return np.abs(plus + minus - 2 * middle) / np.sqrt(6.0)


def rms_by_row(deviations: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the root mean square over runs and rows: one number a row, kept as an array that broadcasts.

    A row is what lies behind one index of the first axis, or the whole array where that would be few elements. Of the
    runs the median counts, so that one in which a ReLU or a routing happened to flip does not speak for all.
    """
    with np.errstate(all="ignore"):
        squares = [
            np.mean(np.abs(d).astype(np.float64) ** 2, axis=row_axes(np.shape(d)), keepdims=True) for d in deviations
        ]
    return np.sqrt(np.median(np.stack(squares), axis=0))


def row_axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the axes that a row extends over."""
    rows = len(shape) > 1 and int(np.prod(shape[1:])) >= _ROW
    return tuple(range(1, len(shape))) if rows else tuple(range(len(shape)))


def in_dtype(array: np.ndarray, dtype: str) -> np.ndarray:
    """Returns a floating-point array in the real dtype, a complex one in its complex dtype, others as they are."""
    if array.dtype.kind == "c":
        return array.astype(np.complex128 if dtype == "float64" else np.complex64)
    if not _is_float(array):
        return array
    if dtype == "bfloat16":
        import ml_dtypes

        return array.astype(ml_dtypes.bfloat16)
    return array.astype(dtype)


def _one_ulp(array: np.ndarray, random: np.random.Generator) -> np.ndarray:
    if array.dtype.kind == "c":
        parts = [_one_ulp(np.ascontiguousarray(part), random) for part in (array.real, array.imag)]
        return (parts[0] + 1j * parts[1]).astype(array.dtype)
    if not _is_float(array):
        return array
    direction = random.integers(-1, 2, array.shape)
    up, down = np.nextafter(array, _like(np.inf, array)), np.nextafter(array, _like(-np.inf, array))
    return np.where(direction > 0, up, np.where(direction < 0, down, array)).astype(array.dtype)


def _moved(array: np.ndarray, random: np.random.Generator, sign: int) -> np.ndarray:
    if not _is_float(array) and array.dtype.kind != "c":
        return array
    wide = array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
    return wide * (1 + sign * ROUNDING_MOVE * random.uniform(-1, 1, array.shape))


def _is_float(array: np.ndarray) -> bool:
    return array.dtype.kind == "f" or array.dtype.name == "bfloat16"


def _like(value: float, array: np.ndarray) -> Any:
    return np.asarray(value, array.dtype)
