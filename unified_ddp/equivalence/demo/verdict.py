"""Turns the recorded steps of both sides into comparisons and a verdict that names what is wrong.

Three comparisons of each step and rank, all of reduced gradients:

- torch, and jax, each against its oracle: the mean, in float64 on the host, of what plain autograd gave on each of its
  ranks at the same weights. This holds in every step whatever happened before, so it locates a broken reduction.
- jax against torch, in lockstep: each side steps on its own gradients, so this also sees a wrong model or optimizer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from unified_ddp.equivalence.compare import (
    Comparison,
    ParamDifference,
    compare_arrays,
    compare_gradients,
    merge_comparisons,
)
from unified_ddp.equivalence.demo.config import Side, VerifyConfig
from unified_ddp.equivalence.demo.diagnose import StepEvidence, explain
from unified_ddp.equivalence.demo.exchange import StepRecord
from unified_ddp.plan import BucketPlan

CROSS = "jax vs torch"
Records = Mapping[Side, Sequence[StepRecord]]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        comparison: such as "torch vs oracle".
        bucket: index in the plan, or None for buffers and fingerprints.
        params: names of exactly the parameters (or buffers) that are outside the tolerance.
        step: the first step in which they are.
        ranks: where, in that step.
        reason: what the numbers look like, in words.
    """

    comparison: str
    bucket: int | None
    params: tuple[str, ...]
    step: int
    ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class VerifyReport:
    """The outcome of one verification.

    Attributes:
        comparisons: largest differences over all steps and ranks, by comparison.
        buffers: the same for batch-norm buffers.
        losses: mean loss over ranks, by side and step.
        fingerprints: of the plan, by "side rank".
        findings: empty if and only if the verdict is green.
    """

    config: VerifyConfig
    plan: BucketPlan
    fingerprints: dict[str, int]
    schema_fingerprint: int
    versions: dict[str, str]
    comparisons: dict[str, Comparison]
    buffers: dict[str, tuple[ParamDifference, ...]]
    losses: dict[Side, list[float]]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """The verdict."""
        return not self.findings


def oracle(records: Sequence[StepRecord]) -> dict[str, np.ndarray]:
    """Returns the mean over ranks of their local gradients, in float64 (float64 gradients: in long double, rounded)."""
    names = records[0].local
    return {
        name: np.asarray(np.mean([r.local[name] for r in records], axis=0, dtype=np.longdouble), np.float64)
        for name in names
    }


@dataclass
class Judge:
    """Takes the steps in order and keeps no more than the last one's arrays."""

    config: VerifyConfig
    plan: BucketPlan
    losses: dict[Side, list[float]] = field(default_factory=lambda: {side: [] for side in Side})
    findings: dict[tuple[str, int | None], Finding] = field(default_factory=dict)
    comparisons: dict[str, Comparison] = field(default_factory=dict)
    buffers: dict[str, tuple[ParamDifference, ...]] = field(default_factory=dict)
    _previous: Records = field(default_factory=dict)

    def add(self, step: int, records: Records) -> None:
        """Compares one step of all ranks of both sides."""
        for side in Side:
            self.losses[side].append(float(np.mean([r.loss for r in records[side]])))
            expected = oracle(records[side])
            pairs = [(expected, r.reduced) for r in records[side]]
            buffers = [(r.plain_buffers, r.buffers) for r in records[side]]
            self._compare(f"{side} vs oracle", step, pairs, buffers, self._evidence(side, records))
        both = list(zip(records[Side.TORCH], records[Side.JAX], strict=True))
        pairs = [(t.reduced, j.reduced) for t, j in both]
        self._compare(CROSS, step, pairs, [(t.buffers, j.buffers) for t, j in both], None)
        self._previous = records

    def _evidence(self, side: Side, records: Records) -> StepEvidence:
        def local(step: Records) -> list[dict[str, np.ndarray]]:
            return [r.local for r in step.get(side, ())]

        return StepEvidence([r.reduced for r in records[side]], local(records), local(self._previous))

    def _compare(
        self,
        title: str,
        step: int,
        pairs: Sequence[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]],
        buffers: Sequence[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]],
        evidence: StepEvidence | None,
    ) -> None:
        by_rank = [compare_gradients(ref, act, self.plan, tolerance=self.config.k) for ref, act in pairs]
        self._find(title, step, [c.params for c in by_rank], evidence)
        known = [self.comparisons[title]] if title in self.comparisons else []
        self.comparisons[title] = merge_comparisons([*known, *by_rank])
        rows = [self._compare_buffers(ref, act) for ref, act in buffers]
        self._find(title, step, rows, None)
        known_rows = [self.buffers[title]] if title in self.buffers else []
        self.buffers[title] = merge_comparisons([Comparison(r) for r in (*known_rows, *rows)]).params

    def _compare_buffers(
        self, reference: dict[str, np.ndarray], actual: dict[str, np.ndarray]
    ) -> tuple[ParamDifference, ...]:
        def tolerance(name: str) -> float | None:
            return self.config.k if actual[name].dtype.kind == "f" else None

        return tuple(compare_arrays(reference[n], actual[n], n, tolerance=tolerance(n)) for n in sorted(reference))

    def _find(
        self, title: str, step: int, rows: Sequence[tuple[ParamDifference, ...]], evidence: StepEvidence | None
    ) -> None:
        """Records the first step in which anything of a bucket (or of the buffers) is wrong."""
        wrong: dict[int | None, dict[str, list[int]]] = {}
        for rank, row in enumerate(rows):
            for p in row:
                if not p.ok or p.non_finite:  # NaN equals NaN, but says nothing about the reduction
                    wrong.setdefault(p.bucket, {}).setdefault(p.name, []).append(rank)
        for bucket, params in wrong.items():
            if (title, bucket) in self.findings:
                continue
            ranks = tuple(sorted({rank for at in params.values() for rank in at}))
            reason = explain(evidence, tuple(params), self.config.k) if evidence else ""
            self.findings[title, bucket] = Finding(title, bucket, tuple(params), step, ranks, reason)

    def result(self) -> tuple[Finding, ...]:
        """Returns the causes: findings of the lockstep comparison only if no oracle has found anything before.

        Once a reduction is broken, the two sides walk apart and everything differs between them.
        """
        found = sorted(self.findings.values(), key=lambda f: (f.step, f.comparison == CROSS))
        causes = [f for f in found if f.comparison != CROSS]
        return tuple(causes) if causes else tuple(f for f in found if f.step == found[0].step)
