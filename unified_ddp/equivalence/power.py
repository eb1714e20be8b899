"""What was not tested: each tensor is changed on one side, and where nothing compared moves, nothing was shown."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unified_ddp.equivalence.observe import Key, Observed, Observer
from unified_ddp.equivalence.results import NotTested
from unified_ddp.equivalence.side import Arrays
from unified_ddp.equivalence.tolerance import Allowance, measure

_CHANGE = 1e-3


def unnoticed(
    observer: Observer,
    values: Arrays,
    batches: Sequence[Any],
    dtype: str,
    noise: Sequence[dict[Key, tuple[np.ndarray, np.ndarray]]],
    progress: Callable[[int, int], None],
) -> tuple[NotTested, ...]:
    """Returns the tensors of which a change by a thousandth moved nothing beyond its tolerance, on any batch.

    Args:
        observer: of the first side; with gradients if these are compared.
        values: the first side's.
        batches: the first side's.
        dtype: of the runs, float64 where it can be had.
        noise: by batch, of both sides, in this dtype.
        progress: is told how many tensors are done, of how many.
    """
    names = sorted(observer.mapping.source_names())
    forward = observer.forward_only()
    before = [observer.observe(values, batch, dtype) for batch in batches]
    random = np.random.default_rng(0)
    found = []
    for done, name in enumerate(names):
        progress(done, len(names))
        changed = {**values, name: _changed(values[name], random)}
        looks = [forward, observer] if observer.gradients else [forward]
        if not any(_moves(look, changed, batches, dtype, before, noise) for look in looks):
            reason = "a change by a thousandth moves nothing that was compared"
            found.append(NotTested(name, observer.mapping.counterparts(name), reason))
    return tuple(found)


def _changed(array: np.ndarray, random: np.random.Generator) -> np.ndarray:
    size = float(np.sqrt(np.mean(np.abs(array).astype(np.float64) ** 2))) if array.size else 0.0
    return (array + _CHANGE * (size or 1.0) * random.standard_normal(array.shape)).astype(
        np.complex128 if array.dtype.kind == "c" else np.float64
    )


def _moves(
    observer: Observer,
    values: Arrays,
    batches: Sequence[Any],
    dtype: str,
    before: Sequence[Observed],
    noise: Sequence[dict[Key, tuple[np.ndarray, np.ndarray]]],
) -> bool:
    for batch, at, allowed in zip(batches, before, noise, strict=True):
        after = observer.observe(values, batch, dtype)
        if any(not measure(at[key], after[key], Allowance(dtype, *allowed[key])).ok for key in after):
            return True
    return False


def idle_rows(runs: Sequence[Observed], observer: Observer) -> tuple[NotTested, ...]:
    """Returns tensors of which some rows, but not all, got a gradient of exactly zero on every batch."""
    found = []
    for key in (key for key in runs[0] if key[0] == "gradient" and runs[0][key].ndim > 1):
        busy = np.any([np.any(run[key] != 0, axis=tuple(range(1, run[key].ndim))) for run in runs], axis=0)
        idle = int((~busy).sum())
        if 0 < idle < busy.size:
            reason = f"{idle} of its {busy.size} rows: their gradient is zero on every batch"
            found.append(NotTested(key[1], observer.mapping.counterparts(key[1]), reason))
    return tuple(found)
