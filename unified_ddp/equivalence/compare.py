"""Compares two sets of gradients, parameter by parameter and bucket by bucket. Takes numpy arrays, knows no framework.

The verdict is per tensor: the largest absolute difference may be `k * max|reference|`. Elementwise relative bounds are
unsound for gradients: an element near zero is a sum of large terms that cancel, and its error is that of the terms.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import reduce
from typing import Any

import numpy as np

from unified_ddp.errors import UnifiedDDPError
from unified_ddp.plan import BucketPlan

DEFAULT_TOLERANCES = {"float64": 1e-13, "float32": 1e-5, "float16": 1e-2, "bfloat16": 8e-2}
"""k by dtype. The first two were measured between frameworks; the last two are ten machine epsilons."""

_REAL_OF_COMPLEX = {"complex64": "float32", "complex128": "float64"}
_BITS = {"float16": np.uint16, "bfloat16": np.uint16, "float32": np.uint32, "float64": np.uint64}


class ComparisonError(UnifiedDDPError, ValueError):
    """Two sets of gradients cannot be compared: names, shapes or dtypes do not fit the plan or each other."""


@dataclass(frozen=True)
class ParamDifference:
    """The largest differences within one tensor.

    Attributes:
        name: the parameter's.
        bucket: index of its bucket, or None outside a plan.
        scale: largest finite |reference|.
        max_abs: largest absolute difference; infinite where one side only is NaN or infinite.
        max_rel: `max_abs / scale`; with a reference of zeros, 0 if equal and infinite if not.
        max_ulp: largest number of representable values between two elements.
        tolerance: k of the verdict.
        non_finite: number of elements that are NaN or infinite on either side.
        ok: `max_abs <= max(k * scale, smallest normal number)`.
    """

    name: str
    bucket: int | None
    scale: float
    max_abs: float
    max_rel: float
    max_ulp: float
    tolerance: float
    non_finite: int
    ok: bool

    def merged(self, other: "ParamDifference") -> "ParamDifference":
        """Returns the larger of each difference; passes only if both pass."""
        return ParamDifference(
            self.name,
            self.bucket,
            max(self.scale, other.scale),
            max(self.max_abs, other.max_abs),
            max(self.max_rel, other.max_rel),
            max(self.max_ulp, other.max_ulp),
            self.tolerance,
            max(self.non_finite, other.non_finite),
            self.ok and other.ok,
        )


@dataclass(frozen=True)
class BucketDifference:
    """The largest differences over the parameters of one bucket, as in `ParamDifference`."""

    index: int
    params: tuple[str, ...]
    max_abs: float
    max_rel: float
    max_ulp: float
    ok: bool


@dataclass(frozen=True)
class Comparison:
    """Every parameter's differences, in the plan's order (bucket by bucket)."""

    params: tuple[ParamDifference, ...]

    @property
    def ok(self) -> bool:
        """Says whether every parameter is inside its tolerance."""
        return all(p.ok for p in self.params)

    @property
    def offenders(self) -> tuple[str, ...]:
        """Names of the parameters outside their tolerance, in the plan's order."""
        return tuple(p.name for p in self.params if not p.ok)

    @property
    def first_offender(self) -> str | None:
        """The first parameter outside its tolerance, or None."""
        return next(iter(self.offenders), None)

    @property
    def buckets(self) -> tuple[BucketDifference, ...]:
        """The same differences by bucket."""
        by_bucket: dict[int, list[ParamDifference]] = {}
        for p in self.params:
            if p.bucket is not None:
                by_bucket.setdefault(p.bucket, []).append(p)
        return tuple(_bucket_difference(index, members) for index, members in sorted(by_bucket.items()))

    def to_dict(self) -> dict[str, Any]:
        """Returns strict JSON's types; infinite values are the string "inf"."""
        return jsonable(
            {
                "ok": self.ok,
                "first_offender": self.first_offender,
                "params": [asdict(p) for p in self.params],
                "buckets": [asdict(b) for b in self.buckets],
            }
        )


def _bucket_difference(index: int, members: list[ParamDifference]) -> BucketDifference:
    return BucketDifference(
        index,
        tuple(p.name for p in members),
        max(p.max_abs for p in members),
        max(p.max_rel for p in members),
        max(p.max_ulp for p in members),
        all(p.ok for p in members),
    )


def jsonable(value: Any) -> Any:
    """Returns `value` with non-finite floats as strings and tuples as lists: strict JSON has neither."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return value


def default_tolerance(dtype: str) -> float:
    """Returns k for a dtype's name; 0 (equal or nothing) for integers and booleans."""
    name = _REAL_OF_COMPLEX.get(dtype, dtype)
    return DEFAULT_TOLERANCES.get(name, 0.0)


def compare_gradients(
    reference: Mapping[str, Any], actual: Mapping[str, Any], plan: BucketPlan, *, tolerance: float | None = None
) -> Comparison:
    """Compares two sets of gradients under a plan.

    Args:
        reference: array by parameter name; of the plan's dtype or float64/complex128.
        actual: array by parameter name; of the plan's dtype.
        plan: names, shapes, dtypes and buckets. Frozen parameters have no gradient and are left out.
        tolerance: k for every parameter; None takes `default_tolerance` of its dtype.

    Raises:
        ComparisonError: a name is missing or unknown, or a shape or dtype does not fit.
    """
    order = [(bucket, plan.params[i]) for bucket, spec in enumerate(plan.buckets) for i in spec.params]
    order = [(bucket, spec) for bucket, spec in order if spec.trainable]
    _check_names("reference", reference, [spec.name for _, spec in order])
    _check_names("actual", actual, [spec.name for _, spec in order])
    rows = []
    for bucket, spec in order:
        for side, arrays in (("reference", reference), ("actual", actual)):
            _check_array(side, spec.name, np.asarray(arrays[spec.name]), tuple(spec.shape), spec.dtype)
        rows.append(
            compare_arrays(reference[spec.name], actual[spec.name], spec.name, bucket=bucket, tolerance=tolerance)
        )
    return Comparison(tuple(rows))


def merge_comparisons(comparisons: Iterable[Comparison]) -> Comparison:
    """Returns the largest differences over comparisons of the same parameters, for instance over steps or ranks.

    Raises:
        ComparisonError: there is none, or they differ in their parameters.
    """
    items = list(comparisons)
    if not items:
        raise ComparisonError("there is no comparison to merge; give at least one")
    names = [p.name for p in items[0].params]
    if any([p.name for p in item.params] != names for item in items):
        raise ComparisonError("comparisons of different parameters cannot be merged; compare under one plan")
    columns = zip(*(item.params for item in items), strict=True)
    return Comparison(tuple(reduce(ParamDifference.merged, column) for column in columns))


def compare_arrays(
    reference: Any, actual: Any, name: str, *, bucket: int | None = None, tolerance: float | None = None
) -> ParamDifference:
    """Compares two arrays of one shape. The tolerance and the ULP follow `actual`'s dtype.

    Raises:
        ComparisonError: the shapes differ, or the dtype is neither a float, complex, integer nor bool known here.
    """
    ref, act = np.asarray(reference), np.asarray(actual)
    if ref.shape != act.shape:
        raise ComparisonError(f"'{name}' has shape {ref.shape} in the reference but {act.shape} in the actual set")
    k = default_tolerance(act.dtype.name) if tolerance is None else tolerance
    ref, act = _as_real(ref), _as_real(act)
    exact = act.dtype.kind in "iub"
    if not exact and act.dtype.name not in _BITS:
        raise ComparisonError(f"'{name}' has dtype {act.dtype.name}, which is not compared; cast it to float32")
    wide_ref, wide_act = ref.astype(np.float64), act.astype(np.float64)
    gaps = _gaps(wide_ref, wide_act)
    finite = np.isfinite(wide_ref)
    scale = float(np.abs(wide_ref[finite]).max(initial=0.0))
    max_abs = float(gaps.max(initial=0.0))
    ulps = gaps if exact else ulp_distance(_narrowed(ref, act.dtype), act)
    # Below the smallest normal number one framework may flush to zero what the other keeps.
    bound = max(k * scale, 0.0 if exact else _smallest_normal(act.dtype))
    return ParamDifference(
        name=name,
        bucket=bucket,
        scale=scale,
        max_abs=max_abs,
        max_rel=max_abs / scale if scale else (math.inf if max_abs else 0.0),
        max_ulp=float(ulps.max(initial=0.0)),
        tolerance=k,
        non_finite=int((~finite | ~np.isfinite(wide_act)).sum()),
        ok=math.isfinite(max_abs) and max_abs <= bound,
    )


def ulp_distance(a: Any, b: Any) -> np.ndarray:
    """Returns by element how many steps of the dtype lie between `a` and `b`, as float64.

    The two zeros are equal and the way from negative to positive goes through them. NaN equals NaN; NaN or infinity
    against anything else is infinitely far.

    Args:
        a: float16, bfloat16, float32 or float64.
        b: of the same dtype and shape.

    Raises:
        ComparisonError: another dtype, or the two differ.
    """
    left, right = np.asarray(a), np.asarray(b)
    if left.dtype != right.dtype or left.dtype.name not in _BITS:
        raise ComparisonError(f"no ULP distance between {left.dtype.name} and {right.dtype.name}; cast both")
    (left_negative, left_size), (right_negative, right_size) = _sign_and_size(left), _sign_and_size(right)
    gap = np.where(left_size > right_size, left_size - right_size, right_size - left_size)
    steps = np.where(left_negative == right_negative, gap, left_size + right_size).astype(np.float64)
    with np.errstate(all="ignore"):
        left_wide, right_wide = left.astype(np.float64), right.astype(np.float64)
    same = (left_wide == right_wide) | (np.isnan(left_wide) & np.isnan(right_wide))
    finite = np.isfinite(left_wide) & np.isfinite(right_wide)
    return np.where(same, 0.0, np.where(finite, steps, np.inf))


def _sign_and_size(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Splits the bits: floats of one sign are ordered as the integers that their other bits spell."""
    unsigned = _BITS[values.dtype.name]
    bits = np.ascontiguousarray(values).view(unsigned).reshape(values.shape).astype(np.uint64)
    sign = np.uint64(1) << np.uint64(8 * np.dtype(unsigned).itemsize - 1)
    return (bits & sign) != 0, bits & (sign - np.uint64(1))


def _gaps(reference: np.ndarray, actual: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        gaps = np.abs(reference - actual)
    same = (reference == actual) | (np.isnan(reference) & np.isnan(actual))
    return np.where(same, 0.0, np.where(np.isnan(gaps), np.inf, gaps))


def _as_real(values: np.ndarray) -> np.ndarray:
    """Complex numbers are compared as pairs of real ones."""
    if values.dtype.name not in _REAL_OF_COMPLEX:
        return values
    return np.stack([values.real, values.imag], axis=-1)


def _narrowed(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(all="ignore"):
        return values.astype(dtype)


def _smallest_normal(dtype: np.dtype) -> float:
    return 2.0**-126 if dtype.name == "bfloat16" else float(np.finfo(dtype).smallest_normal)


def _check_names(side: str, arrays: Mapping[str, Any], expected: list[str]) -> None:
    missing = [name for name in expected if name not in arrays]
    extra = sorted(set(arrays) - set(expected))
    if missing or extra:
        parts = [f"lacks {missing}"] * bool(missing) + [f"has {extra}, which the plan does not know"] * bool(extra)
        raise ComparisonError(f"the {side} set of gradients {' and '.join(parts)}; give one for each parameter")


def _check_array(side: str, name: str, array: np.ndarray, shape: tuple[int, ...], dtype: str) -> None:
    if array.shape != shape:
        raise ComparisonError(f"'{name}' has shape {array.shape} in the {side} set, but {shape} in the plan")
    wide = "complex128" if dtype in _REAL_OF_COMPLEX else "float64"
    allowed = (dtype, wide) if side == "reference" else (dtype,)
    if array.dtype.name not in allowed:
        raise ComparisonError(f"'{name}' has dtype {array.dtype.name} in the {side} set, but {dtype} in the plan")
