"""One verdict a tensor: float64 says whether the programs differ, the dtype asked for how they round."""

from dataclasses import replace

import numpy as np

from unified_ddp.equivalence.results import Finding, Measure, Verdict
from unified_ddp.equivalence.tolerance import NOISE_FACTOR

_BLIND = {"float64": 1e-4, "float32": 1e-2, "float16": 0.5, "bfloat16": 0.5}
"""A tolerance that is this large beside the numbers themselves lets any difference through."""

_ZERO = {"float64": 1e-5, "float32": 1e-2, "float16": 1e-1, "bfloat16": 1e-1}
"""What may be taken for rounding errors of zero is no larger than this, beside the largest tensor of its kind."""


def judged(finding: Finding, of_all: tuple[float, float] = (0.0, 0.0), note: str = "") -> Finding:
    """Returns the finding with its verdict.

    Args:
        finding: with its measures; its verdict does not matter.
        of_all: scale of the largest tensor of its kind in the dtype asked for and in float64.
        note: a hint at the cause, kept if the sides differ.
    """
    known = [(m, scale) for m, scale in ((finding.float64, of_all[1]), (finding.measure, of_all[0])) if m is not None]
    if not known:
        return replace(finding, verdict=Verdict.NOT_TESTED, note=finding.note or "was not run")
    sighted = [(m, scale) for m, scale in known if not _is_blind(m, scale)]
    if not sighted:
        bad = next((m for m, _ in known if not m.ok), None)
        verdict = Verdict.NOT_TESTED if bad is None else Verdict.DIFFERS
        return replace(finding, verdict=verdict, note=_blindness(known[0][0]) if bad is None else note)
    (arbiter, scale), *rest = sighted
    if not arbiter.ok:
        return replace(finding, verdict=Verdict.DIFFERS, note=note)
    if any(not m.ok and not _is_zero(m, s) for m, s in rest):
        return replace(finding, verdict=Verdict.PRECISION, note=note)
    return replace(finding, verdict=Verdict.ZERO if _is_zero(arbiter, scale) else Verdict.PASS, note="")


def _is_blind(measure: Measure, of_all: float) -> bool:
    """The tolerance would let anything through, and the tensor is no rounding error of zero."""
    if _is_zero(measure, of_all) or measure.difference == 0:
        return False
    return measure.tolerance > _BLIND[measure.dtype] * measure.scale


def _blindness(measure: Measure) -> str:
    share = measure.tolerance / measure.scale / NOISE_FACTOR if measure.scale else np.inf
    return f"rounding alone moves it by {100 * share:.2g} % of its size in {measure.dtype}"


def _is_zero(measure: Measure, of_all: float) -> bool:
    """Both sides are smaller than what rounding moves them by."""
    if measure.scale == 0:
        return measure.difference == 0 and of_all > 0
    noise = NOISE_FACTOR * sum(measure.noise)
    return measure.scale <= max(noise, measure.tolerance) and measure.scale <= _ZERO[measure.dtype] * of_all


def hint(first: np.ndarray, second: np.ndarray) -> str:
    """Returns what a difference looks like, such as a constant ratio or exchanged axes; "" if like nothing known."""
    if first.shape != second.shape:
        return ""
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        both = np.isnan(first).any() and np.isnan(second).any()
        return "not a number on both sides" if both else "one side is not finite"
    if first.size < 2:
        return ""
    a, b = first.ravel(), second.ravel()
    norm = float(np.vdot(a, a).real)
    if norm == 0:
        return "zero on the first side only"
    if not np.any(b):
        return "zero on the second side only"
    if np.iscomplexobj(first) and _near(second, first.conj()):
        return "the second side is the complex conjugate of the first"
    ratio = constant_ratio(first, second)
    if ratio is not None:
        return f"the second side is {ratio:.6g} times the first"
    square = first.ndim >= 2 and first.shape[0] == first.shape[1]
    if square and _near(second, first.swapaxes(0, 1)):
        return "the second side is the first with axes 0 and 1 exchanged"
    if _near(np.sort(b), np.sort(a)):
        return "both sides hold the same numbers in another order"
    return ""


def constant_ratio(first: np.ndarray, second: np.ndarray) -> float | None:
    """Returns how many times the first array the second is; None if it is no multiple. A single number is one."""
    if first.shape != second.shape or not first.size or not (np.isfinite(first).all() and np.isfinite(second).all()):
        return None
    a, b = first.ravel(), second.ravel()
    norm = float(np.vdot(a, a).real)
    ratio = float(np.vdot(a, b).real) / norm if norm else 0.0
    return ratio if ratio and _near(second, ratio * first) else None


def _near(actual: np.ndarray, wanted: np.ndarray) -> bool:
    return bool(np.linalg.norm((actual - wanted).ravel()) <= 1e-4 * np.linalg.norm(wanted.ravel()))
