"""What difference is allowed: c * (noise of the first + noise of the second) + k * eps * T, row by row.

T is the largest number of the row. float64 has nine more digits than it needs to tell programs apart, and is given some
of them back: libraries of different makers differ in their last digits of exp, erf and the like.
"""

from dataclasses import dataclass

import numpy as np

from unified_ddp.equivalence.compare import ulp_distance
from unified_ddp.equivalence.noise import row_axes
from unified_ddp.equivalence.results import Measure

NOISE_FACTOR = 8.0
"""c: the largest of a million normal numbers is five times their RMS."""

_WIDE_FACTOR = 4.0
"""On top of c in float64: a program that rounds to less inside has errors, as of its exp, that no movement shows."""

_EPSILONS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
_TERMS = 8.0
"""k."""

_FLOAT64_RELATIVE = 1e-11
_FLOAT64_OF_ALL = 1e-14
_ULP_BINS = 56


@dataclass(frozen=True)
class Allowance:
    """What is known of one tensor's rounding.

    Attributes:
        dtype: the run's real dtype.
        first: noise of the first side, an array that broadcasts over the tensor; see `rms_by_row`.
        second: of the second side.
        of_all: scale of the largest tensor of its kind, beside which a smaller one may be rounding.
        extra: further absolute allowance, broadcasts.
        relative: allowed relative to the row's scale, at the least; 0 for none.
    """

    dtype: str
    first: np.ndarray | float = 0.0
    second: np.ndarray | float = 0.0
    of_all: float = 0.0
    extra: np.ndarray | float = 0.0
    relative: float = 0.0

    def tolerance(self, scale: np.ndarray) -> np.ndarray:
        """Returns the allowed difference by element, for a scale by row."""
        relative = max(_TERMS * _EPSILONS[self.dtype], self.relative)
        floor = 0.0
        if self.dtype == "float64":
            relative, floor = max(relative, _FLOAT64_RELATIVE), _FLOAT64_OF_ALL * self.of_all
        noise = (np.asarray(self.first) + np.asarray(self.second)) * (_WIDE_FACTOR if self.dtype == "float64" else 1.0)
        return NOISE_FACTOR * noise + relative * scale + floor + self.extra


def row_scale(*arrays: np.ndarray) -> np.ndarray:
    """Returns the largest finite absolute value by row, broadcastable; rows are those of `rms_by_row`."""
    both = np.maximum.reduce([np.where(np.isfinite(np.abs(a)), np.abs(a), 0).astype(np.float64) for a in arrays])
    return both.max(axis=row_axes(both.shape), keepdims=True, initial=0.0)


def measure(first: np.ndarray, second: np.ndarray, allowance: Allowance) -> Measure:
    """Returns the distance of two arrays of one shape. Integers and bools are equal or infinitely far, as is NaN."""
    noise = (_largest(allowance.first), _largest(allowance.second))
    if first.shape != second.shape:
        return Measure(allowance.dtype, np.inf, 0.0, np.inf, noise, 0.0, np.inf, np.inf, 1.0, ())
    if first.size == 0:
        return Measure(allowance.dtype, 0.0, 0.0, 0.0, noise, 0.0, 0.0, 0.0, 0.0, ())
    wide = [a.astype(np.complex128 if a.dtype.kind == "c" else np.float64) for a in (first, second)]
    exact = first.dtype.kind in "iub" and second.dtype.kind in "iub"
    gaps = _gaps(*wide)
    tolerance = np.broadcast_to(np.asarray(0.0 if exact else allowance.tolerance(row_scale(*wide))), gaps.shape)
    with np.errstate(all="ignore"):
        excess = np.where(gaps == 0, 0.0, np.where(np.isfinite(gaps), gaps / tolerance, np.inf))
    worst = np.unravel_index(int(np.argmax(excess)), excess.shape)
    ulps = gaps if exact else _ulps(first, second, allowance.dtype)
    size = np.abs(wide[0])
    norm = float(np.sqrt(np.sum(np.where(np.isfinite(size), size, 0) ** 2)))
    distance = float(np.sqrt(np.sum(gaps**2)))
    return Measure(
        dtype=allowance.dtype,
        difference=float(gaps.max()),
        tolerance=float(tolerance[worst]),
        excess=float(excess[worst]),
        noise=noise,
        scale=float(np.max(np.where(np.isfinite(size), size, 0))),
        max_ulp=float(ulps.max()),
        relative_l2=distance / norm if norm else (np.inf if distance else 0.0),
        share_over=float(np.mean(excess > 1)),
        where=tuple(int(i) for i in worst),
        ulp_counts=_histogram(ulps),
    )


def _gaps(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        gaps = np.abs(first - second)
    same = first == second  # NaN on both sides shows nothing, and is never taken for agreement
    return np.where(same, 0.0, np.where(np.isnan(gaps), np.inf, gaps))


def _ulps(first: np.ndarray, second: np.ndarray, dtype: str) -> np.ndarray:
    if first.dtype.kind == "c":
        return np.maximum(_ulps(first.real, second.real, dtype), _ulps(first.imag, second.imag, dtype))
    kind = first.dtype if dtype not in ("float32", "float64") else np.dtype(dtype)
    with np.errstate(all="ignore"):
        return ulp_distance(first.astype(kind), second.astype(kind))


def _histogram(ulps: np.ndarray) -> tuple[int, ...]:
    finite = np.where(np.isfinite(ulps), ulps, 2.0**_ULP_BINS)
    bins = np.where(finite < 1, 0, np.minimum(np.floor(np.log2(np.maximum(finite, 1))) + 1, _ULP_BINS)).astype(int)
    counts = np.bincount(bins.ravel())
    return tuple(int(count) for count in counts)


def _largest(noise: np.ndarray | float) -> float:
    return float(np.max(noise)) if np.size(noise) else 0.0
