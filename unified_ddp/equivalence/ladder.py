"""The rungs one after the other, and what of a failure is only the consequence of an earlier one."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from unified_ddp.equivalence.errors import EquivalenceError
from unified_ddp.equivalence.power import idle_rows, unnoticed
from unified_ddp.equivalence.reduced import compare_reduced
from unified_ddp.equivalence.reporting import Report
from unified_ddp.equivalence.results import RUNGS, BucketRow, BucketTime, Curve, Finding, NotTested, Rung, Verdict
from unified_ddp.equivalence.rungs import KIND_OF, Compared, compare_batch, run_both
from unified_ddp.equivalence.training import Training

_UPSTREAM = {
    "loss": ("outputs",),
    "buffers": ("outputs",),
    "gradients": ("outputs", "loss"),
    "reduced": ("outputs", "loss", "gradients"),
    "steps": ("outputs", "loss", "buffers", "gradients", "update"),
    "curve": ("outputs", "loss", "buffers", "gradients", "update", "steps"),
}
"""What each rung is computed from. An update is given its gradients, so it has nothing above it."""

_NEEDS_OPTIMIZER = ("update", "steps", "curve")
_FAILED = (Verdict.DIFFERS, Verdict.PRECISION)


@dataclass(frozen=True)
class Settings:
    """Of one check; see `Pair.check`."""

    until: str
    ranks: int
    steps: int
    dtype: str
    weights: str
    power: bool
    progress: Callable[[str, int, int], None]

    @property
    def rungs(self) -> tuple[str, ...]:
        """Those asked for."""
        return RUNGS[: RUNGS.index(self.until) + 1]


class Ladder:
    """One check of a pair.

    Args:
        pair: a `Pair`.
        settings: what is checked.
    """

    def __init__(self, pair: Any, settings: Settings) -> None:
        self.pair, self.settings = pair, settings
        self.notes: list[str] = []
        self.curve: Curve | None = None
        self.not_tested: list[NotTested] = []
        self.buckets: tuple[BucketRow, ...] = ()
        self.timeline: tuple[BucketTime, ...] = ()
        self.rounding: tuple[float, ...] = (0.0, 0.0)
        self.started = time.monotonic()

    def climb(self) -> Report:
        """Runs every rung and returns the report."""
        self.settings.progress("mapping", 0, 1)
        self._require_optimizers()
        self.observers = self.pair.observers()
        self.values = self.pair.values(self.settings.weights)
        self._require_determined()
        if self.pair.mapping_note:
            self.notes.append(self.pair.mapping_note)
        rungs = [*self._static_rungs(), *self._reduced_rung(), *self._training_rungs()]
        rungs = [_with_consequences(rung, rungs[:i]) for i, rung in enumerate(rungs)]
        return self._report(rungs)

    def _require_optimizers(self) -> None:
        if self.settings.until in _NEEDS_OPTIMIZER:
            for which, side in (("first", self.pair.first), ("second", self.pair.second)):
                if not side.has_optimizer:
                    raise EquivalenceError(
                        f"until={self.settings.until!r} needs an optimizer on both sides; the {which} side "
                        f"({side.framework}) has none: give it optimizer="
                    )

    def _require_determined(self) -> None:
        for observer, values in zip(self.observers, self.values, strict=True):
            what = observer.side.randomness(values, observer.batch(self.pair.batches[0]))
            if what:
                raise EquivalenceError(
                    f"the {observer.side.framework} side is random ({what}), and random numbers of two frameworks "
                    "never agree: set the rates to 0, or compare in evaluation mode"
                )

    def _static_rungs(self) -> list[Rung]:
        """Outputs, loss, buffers and gradients, all of which come of the same runs."""
        names = [rung for rung in self.settings.rungs if rung in KIND_OF]
        observers = self.observers
        if "gradients" not in names:
            observers = (observers[0].forward_only(), observers[1].forward_only())
        began = time.monotonic()
        runs = [self._run(observers, i, batch) for i, batch in enumerate(self.pair.batches)]
        if self.settings.power:
            self._check_power(observers, runs)
        rungs = []
        for name in names:
            findings: list[Finding] = []
            for step, (run, wide) in enumerate(runs):
                findings += compare_batch(name, run, wide, self.settings.dtype, step, self._named)
            if not findings and name == "buffers":
                continue
            note = "" if findings else "the loss functions return no outputs: (loss, outputs)"
            rungs.append(Rung(name, tuple(findings), (time.monotonic() - began) / len(names), note))
        return rungs

    def _run(self, observers: Any, index: int, batch: Any) -> tuple[Compared | None, Compared | None]:
        dtype, total = self.settings.dtype, len(self.pair.batches)
        self.settings.progress("comparing", index, total)
        run = wide = None
        if dtype != "float64":
            run = run_both(observers, self.values, batch, dtype, self.pair.seed)
        try:
            wide = run_both(observers, self.values, batch, "float64", self.pair.seed)
        except Exception as error:
            if run is None or isinstance(error, EquivalenceError):
                raise
            self._note(f"float64 cannot arbitrate, as a side does not run in it: {_first_line(error)}")
        self.rounding = tuple(map(max, self.rounding, _inner_rounding(wide)))
        for compared in (run, wide):
            for note in compared.notes if compared else ():
                self._note(note)
        return run, wide

    def _reduced_rung(self) -> list[Rung]:
        if "reduced" not in self.settings.rungs:
            return []
        if self.settings.ranks < 2:
            return [Rung("reduced", (), note="ranks=1: there is nothing to reduce")]
        self.settings.progress("reduced", 0, 1)
        began = time.monotonic()
        found = compare_reduced(
            self.observers,
            self.values,
            self.pair.batches[0],
            self.settings.ranks,
            self.settings.dtype,
            self.pair.seed,
        )
        self.buckets, self.timeline = found.buckets, found.timeline
        return [Rung("reduced", tuple(found.findings), time.monotonic() - began)]

    def _training_rungs(self) -> list[Rung]:
        names = [rung for rung in self.settings.rungs if rung in _NEEDS_OPTIMIZER]
        if not names:
            return []
        batches = [self.pair.batches[i % len(self.pair.batches)] for i in range(self.settings.steps)]
        training = Training(self.observers, self.values, batches, self.settings.dtype, self.pair.seed, self._named)
        rungs: list[Rung] = []
        for name in names:
            self.settings.progress(name, 0, 1)
            began = time.monotonic()
            if name == "update":
                findings = training.update()
            elif name == "steps":
                findings = training.steps(self._note)
            else:
                agree = rungs[-1].verdict.ok and all(f.float64 is not None for f in rungs[-1].findings)
                findings, self.curve = training.curve(same_programs=agree)
            rungs.append(Rung(name, tuple(findings), time.monotonic() - began))
        return rungs

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def _check_power(self, observers: Any, runs: list[tuple[Compared | None, Compared | None]]) -> None:
        kept = [wide or run for run, wide in runs]
        assert all(kept)
        compared = [c for c in kept if c is not None]
        dtype = "float64" if all(wide for _, wide in runs) else self.settings.dtype
        self.not_tested += unnoticed(
            observers[0],
            self.values[0],
            self.pair.batches,
            dtype,
            [c.noise for c in compared],
            lambda done, total: self.settings.progress("power", done, total),
        )
        known = {item.name for item in self.not_tested}
        self.not_tested += [i for i in idle_rows([c.first for c in compared], observers[0]) if i.name not in known]

    def _named(self, kind: str, name: str) -> tuple[str, tuple[str, ...]]:
        """Returns the first side's name of a tensor in shared coordinates, and the second's."""
        mapping = self.pair.mapping
        if kind == "gradient":
            return name, mapping.counterparts(name)
        if kind in ("buffer", "parameter"):
            return mapping.sources[name][0].name, (name,)
        return name, (name,)

    def _report(self, rungs: list[Rung]) -> Report:
        settings, mapping = self.settings, self.pair.mapping
        for side, share in zip((self.pair.first, self.pair.second), self.rounding, strict=True):
            if share > _DOUBLE:
                self._note(
                    f"the {side.framework} side rounds to less than float64 inside: differences of programs below a "
                    f"relative {_told(share)} are not seen"
                )
        blind = {f.name: f for r in rungs for f in r.findings if f.verdict is Verdict.NOT_TESTED}
        known = {item.name for item in self.not_tested}
        self.not_tested += [NotTested(f.name, f.counterparts, f.note) for f in blind.values() if f.name not in known]
        left_out = [NotTested(name, (), reason) for name, reason in mapping.ignored.items()]
        texts = {name: " + ".join(s.text() for s in sources) for name, sources in mapping.sources.items()}
        return Report(
            rungs=tuple(rungs),
            sides=(self.pair.first.info(), self.pair.second.info()),
            dtype=settings.dtype,
            until=settings.until,
            ranks=settings.ranks,
            steps=settings.steps,
            seed=self.pair.seed,
            weights=settings.weights,
            mapping=texts,
            not_tested=(*self.not_tested, *left_out),
            notes=tuple(self.notes),
            buckets=self.buckets,
            timeline=self.timeline,
            curve=self.curve,
            seconds=time.monotonic() - self.started,
        )


def _with_consequences(rung: Rung, before: list[Rung]) -> Rung:
    upstream = _UPSTREAM.get(rung.name, ())
    if not any(r.verdict in _FAILED for r in before if r.name in upstream):
        return rung
    findings = tuple(
        replace(f, verdict=Verdict.CONSEQUENCE) if f.verdict in _FAILED and f.side is None else f for f in rung.findings
    )
    return replace(rung, findings=findings)


_DOUBLE = 1e-11
"""Relative noise above which a run in float64 was not one in all its parts."""


def _inner_rounding(wide: Compared | None) -> tuple[float, float]:
    """Returns by side the relative noise of outputs and loss in float64."""
    if wide is None:
        return 0.0, 0.0
    shares = [
        tuple(float(np.max(noise, initial=0.0)) / scale for noise in wide.noise[key])
        for key, value in wide.first.items()
        if key[0] in ("output", "loss") and (scale := float(np.max(np.abs(value), initial=0.0)))
    ]
    return tuple(max((share[i] for share in shares), default=0.0) for i in (0, 1))  # type: ignore[return-value]


def _told(share: float) -> str:
    return f"{32 * share:.0e}"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
