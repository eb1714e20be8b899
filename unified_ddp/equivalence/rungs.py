"""Rungs that compare one forward and backward on one batch: outputs, loss, buffers, gradients."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from unified_ddp.equivalence.errors import EquivalenceError
from unified_ddp.equivalence.judge import constant_ratio, hint, judged
from unified_ddp.equivalence.observe import Key, Observed, Observer
from unified_ddp.equivalence.results import Finding, Measure, Verdict
from unified_ddp.equivalence.side import Arrays
from unified_ddp.equivalence.tolerance import Allowance, measure

KIND_OF = {"outputs": "output", "loss": "loss", "buffers": "buffer", "gradients": "gradient"}


@dataclass
class Compared:
    """One dtype's run of both sides on one batch.

    Attributes:
        first: what the first side gave, in shared coordinates.
        second: what the second side gave.
        noise: by tensor, of the first and of the second side.
        notes: what a reader should know.
    """

    first: Observed
    second: Observed
    noise: dict[Key, tuple[np.ndarray, np.ndarray]]
    notes: list[str] = field(default_factory=list)

    def measures(self, dtype: str) -> dict[Key, Measure]:
        """Returns the distance of every tensor that both sides have."""
        scales = self.scales()
        return {
            key: measure(
                self.first[key], self.second[key], Allowance(dtype, *self.noise[key], of_all=scales.get(key[0], 0.0))
            )
            for key in self.first
        }

    def scales(self) -> dict[str, float]:
        """Returns by kind the scale of its largest tensor; outputs and buffers are each their own."""
        largest: dict[str, float] = {}
        for kind, name in self.first:
            if kind == "gradient":
                both = [np.abs(side[kind, name]).astype(np.float64) for side in (self.first, self.second)]
                here = max(float(np.max(np.where(np.isfinite(b), b, 0), initial=0.0)) for b in both)
                largest[kind] = max(largest.get(kind, 0.0), here)
        return largest


def run_both(
    observers: tuple[Observer, Observer], values: tuple[Arrays, Arrays], batch: Any, dtype: str, seed: int
) -> Compared:
    """Runs both sides on one batch in one dtype, and learns their noise.

    Raises:
        EquivalenceError: outputs of one side have no counterpart.
    """
    batches = [observer.batch(batch) for observer in observers]
    raw = [o.observe(v, b, dtype) for o, v, b in zip(observers, values, batches, strict=True)]
    names = _renaming(*raw)
    _require_numbers(raw[0], {names[key]: raw[1][key] for key in names}, dtype)
    noise, notes = [], _frozen(raw[0], raw[1])
    for observer, own, inputs, run in zip(observers, values, batches, raw, strict=True):
        found, note = observer.noise(own, inputs, dtype, run, seed)
        noise.append(found)
        notes += [note] if note else []
    second = {names[key]: value for key, value in raw[1].items() if key in names}
    moved = {names[key]: value for key, value in noise[1].items() if key in names}
    return Compared(raw[0], second, {key: (noise[0][key], moved[key]) for key in raw[0]}, notes)


def _frozen(first: Observed, second: Observed) -> list[str]:
    """JAX has gradients of all parameters, torch of those that are trained."""
    names = [name for kind, name in second if kind == "gradient" and (kind, name) not in first]
    told = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return [f"frozen on the first side, so that their gradients are not compared: {told}"] if names else []


def _require_numbers(first: Observed, second: Observed, dtype: str) -> None:
    for (kind, name), value in first.items():
        if value.dtype.kind in "fc" and np.isnan(value).any() and np.isnan(second[kind, name]).any():
            raise EquivalenceError(
                f"the {kind} '{name}' is NaN on both sides in {dtype}, which shows nothing. Give other batches, or, if "
                'scrambled weights are the cause, weights="as they are"'
            )


def _renaming(first: Observed, second: Observed) -> dict[Key, Key]:
    """Returns the first side's key by the second's: a single output needs no name."""
    ours, theirs = ([key for key in side if key[0] == "output"] for side in (first, second))
    alone = len(ours) == len(theirs) == 1
    names = {key: ours[0] if alone and key[0] == "output" else key for key in second}
    names = {key: name for key, name in names.items() if key[0] != "gradient" or name in first}
    for kind in ("output", "buffer", "gradient"):
        have = [{name for k, name in keys if k == kind} for keys in (first, names.values())]
        lacking = [sorted(have[0] - have[1]), sorted(have[1] - have[0])]
        if any(lacking):
            raise EquivalenceError(
                f"{kind}s that one side alone has: first {lacking[0]}, second {lacking[1]}. {_REMEDY[kind]}"
            )
    return names


_REMEDY = {
    "output": "Return the same keys from both loss functions",
    "buffer": "Give both sides the same module state, or say ignore=",
    "gradient": "Train on the second side what is trained on the first",
}


def keys_of(rung: str, compared: Compared) -> list[Key]:
    """Returns the tensors of a rung, in the first side's order."""
    return [key for key in compared.first if key[0] == KIND_OF[rung]]


def compare_batch(
    rung: str, run: Compared | None, wide: Compared | None, dtype: str, step: int, counterparts: Any
) -> list[Finding]:
    """Returns the findings of one rung on one batch.

    Args:
        rung: one of `KIND_OF`.
        run: in the dtype asked for; None if that is float64.
        wide: in float64; None if it cannot arbitrate.
        dtype: asked for.
        step: of the batch.
        counterparts: a function from kind and name to the names of the other side.
    """
    some = wide or run
    assert some is not None
    measures = run.measures(dtype) if run else {}
    wides = wide.measures("float64") if wide else {}
    of_all = tuple(c.scales().get(KIND_OF[rung], 0.0) if c else 0.0 for c in (run, wide))
    findings = []
    for key in keys_of(rung, some):
        name, others = counterparts(*key)
        bare = Finding(rung, name, others, key[0], Verdict.PASS, measures.get(key), wides.get(key), step=step)
        note = hint(some.first[key], some.second[key])
        judgement = judged(bare, (of_all[0], of_all[1]), note)
        if judgement.verdict is Verdict.DIFFERS:
            judgement = replace(judgement, ratio=constant_ratio(some.first[key], some.second[key]))
        findings.append(judgement)
    return findings
