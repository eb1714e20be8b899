"""What a comparison found: plain frozen data, without arrays and frameworks, all of which goes to JSON.

The two sides of a pair are the *first* and the *second*. Tensors are compared in the first side's coordinates, so a
finding bears the first side's name, and the second side's names are its counterparts.
"""

import enum
from dataclasses import asdict, dataclass
from typing import Any

from unified_ddp.equivalence.compare import jsonable

REPORT_FORMAT = "unified_ddp.equivalence.1"

RUNGS = ("outputs", "loss", "buffers", "gradients", "reduced", "update", "steps", "curve")
"""In the order in which they are compared. `buffers` are those after one forward, such as running statistics."""


class Verdict(enum.StrEnum):
    """Of a tensor, a rung or a report; listed from best to worst."""

    PASS = "pass"
    ZERO = "zero within rounding"
    """Both sides hold nothing but rounding errors of terms that cancel: equal, and no relative error means anything."""
    NOT_TESTED = "not tested"
    CONSEQUENCE = "consequence"
    """Differs, but so did what it was computed from."""
    PRECISION = "precision"
    """Differs by more than noise in the dtype asked for, and agrees in float64: one program, rounded differently."""
    DIFFERS = "differs"

    @property
    def ok(self) -> bool:
        """Says whether the two sides agree."""
        return self in (Verdict.PASS, Verdict.ZERO)


@dataclass(frozen=True)
class Measure:
    """The distance of two tensors in one dtype.

    Attributes:
        dtype: the run's, such as "float32".
        difference: largest absolute difference; infinite where one side only is NaN or infinite, or shapes differ.
        tolerance: allowed at the element with the largest `excess`.
        excess: largest difference / tolerance over the elements; passes up to 1.
        noise: how much the first and the second side move by rounding alone, at that element's row; RMS.
        scale: largest absolute value of the first side.
        max_ulp: largest number of representable values between two elements.
        relative_l2: |first - second| / |first|.
        share_over: share of elements over their tolerance, 0 to 1.
        where: index of the element with the largest `excess`, in the first side's coordinates.
        ulp_counts: [0] is the number of equal elements, [i] of those at least 2^(i-1) and less than 2^i ULP apart.
    """

    dtype: str
    difference: float
    tolerance: float
    excess: float
    noise: tuple[float, float]
    scale: float
    max_ulp: float
    relative_l2: float
    share_over: float
    where: tuple[int, ...]
    ulp_counts: tuple[int, ...] = ()

    @property
    def ok(self) -> bool:
        """Says whether every element is inside its tolerance."""
        return self.excess <= 1.0


@dataclass(frozen=True)
class Finding:
    """The verdict on one tensor at one rung.

    Attributes:
        rung: one of `RUNGS`.
        name: the first side's name of the tensor; an output's key; "loss".
        counterparts: the second side's names of it.
        kind: "output", "loss", "gradient", "buffer" or "parameter".
        verdict: see `Verdict`.
        measure: in the dtype asked for; None if it was not run.
        float64: the same in float64, which arbitrates; None if it was not run.
        side: framework of the side that is compared with its own oracle (a reduction); None if the sides are compared.
        rank: of the reduction; None elsewhere.
        step: of the batch or training step, from 0.
        bucket: index in the plan; None outside one.
        note: what is known of the cause, or why it was not tested; "" if nothing.
        ratio: the second side is this many times the first; None if they differ otherwise, or agree.
    """

    rung: str
    name: str
    counterparts: tuple[str, ...]
    kind: str
    verdict: Verdict
    measure: Measure | None = None
    float64: Measure | None = None
    side: str | None = None
    rank: int | None = None
    step: int = 0
    bucket: int | None = None
    note: str = ""
    ratio: float | None = None

    @property
    def decisive(self) -> Measure | None:
        """The measure that the verdict rests on: the worse of the two dtypes."""
        known = [m for m in (self.float64, self.measure) if m is not None]
        return max(known, key=lambda m: m.excess, default=None)


@dataclass(frozen=True)
class Rung:
    """All that was compared at one rung.

    Attributes:
        name: one of `RUNGS`.
        findings: one for each tensor, step and rank.
        seconds: wall time.
        note: why it was not run; "" if it was.
    """

    name: str
    findings: tuple[Finding, ...]
    seconds: float = 0.0
    note: str = ""

    @property
    def verdict(self) -> Verdict:
        """The worst of the findings; "not tested" if there is none or none was tested."""
        tested = [f.verdict for f in self.findings if f.verdict is not Verdict.NOT_TESTED]
        if not tested:
            return Verdict.NOT_TESTED
        worst = max(tested, key=list(Verdict).index)
        return Verdict.PASS if worst is Verdict.ZERO else worst

    @property
    def worst(self) -> Finding | None:
        """The finding with the worst verdict, among those the one that is farthest over its tolerance."""
        order = list(Verdict)
        return max(self.findings, key=lambda f: (order.index(f.verdict), _excess(f)), default=None)


def _excess(finding: Finding) -> float:
    measure = finding.decisive
    return measure.excess if measure else -1.0


@dataclass(frozen=True)
class NotTested:
    """A tensor on which the comparison says nothing.

    Attributes:
        name: on the side that has it, the first one's if both have.
        counterparts: the second side's names of it.
        reason: why nothing is said.
    """

    name: str
    counterparts: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class SideInfo:
    """One side.

    Attributes:
        framework: "torch" or "jax".
        versions: of the packages that took part.
        flags: settings on which precision depends, such as {"matmul precision": "highest", "TF32": "off"}.
        devices: where it ran.
        parameters: number of parameters, in elements.
        tensors: number of parameters, in tensors.
    """

    framework: str
    versions: dict[str, str]
    flags: dict[str, str]
    devices: tuple[str, ...]
    parameters: int
    tensors: int


@dataclass(frozen=True)
class Curve:
    """Losses of free-running training.

    Attributes:
        first: the first side's loss by step.
        second: the second side's.
        low: lower edge of the band by step: runs of the first side whose inputs were moved by one ULP, widened.
        high: upper edge.
    """

    first: tuple[float, ...]
    second: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True)
class BucketRow:
    """One bucket of the plan.

    Attributes:
        index: in the plan.
        names: the first side's, in order of storage.
        counterparts: the second side's names of them.
        bytes: of the whole bucket.
        sizes: bytes of each of `names`; empty if they are not known.
    """

    index: int
    names: tuple[str, ...]
    counterparts: tuple[str, ...]
    bytes: int
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class BucketTime:
    """When one bucket of one rank was ready and when it was reduced, in seconds since its backward began.

    Attributes:
        side: framework of the side.
        rank: of the reduction.
        bucket: index in the plan.
        ready: its last gradient was there.
        reduced: its all-reduce was done.
    """

    side: str
    rank: int
    bucket: int
    ready: float
    reduced: float


@dataclass(frozen=True)
class Results:
    """All that one `check` found.

    Attributes:
        rungs: those asked for, in order; each says itself whether it was run.
        sides: the first and the second.
        dtype: asked for.
        until: the last rung asked for.
        ranks: of the reduction.
        steps: of training.
        seed: of scrambled weights and of jitter.
        weights: "scrambled" or "as they are".
        mapping: the second side's names with the rule that makes each, as in the mapping's file.
        not_tested: tensors on which nothing can be said.
        notes: what a reader should know, such as that float64 could not arbitrate.
        buckets: of the plan; empty unless reduced.
        timeline: empty unless reduced and recorded.
        curve: None unless it was run.
        seconds: wall time.
    """

    rungs: tuple[Rung, ...]
    sides: tuple[SideInfo, SideInfo]
    dtype: str
    until: str
    ranks: int
    steps: int
    seed: int
    weights: str
    mapping: dict[str, str]
    not_tested: tuple[NotTested, ...] = ()
    notes: tuple[str, ...] = ()
    buckets: tuple[BucketRow, ...] = ()
    timeline: tuple[BucketTime, ...] = ()
    curve: Curve | None = None
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Says whether no rung differs and the last one was tested; tensors that were not tested do not fail it."""
        bad = (Verdict.DIFFERS, Verdict.PRECISION, Verdict.CONSEQUENCE)
        return not any(r.verdict in bad for r in self.rungs) and bool(self.rungs) and self.rungs[-1].verdict.ok

    @property
    def first_failure(self) -> Rung | None:
        """The first rung that does not agree, or None."""
        return next((r for r in self.rungs if r.verdict in (Verdict.DIFFERS, Verdict.PRECISION)), None)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All of them, rung by rung."""
        return tuple(f for rung in self.rungs for f in rung.findings)

    def worst(self, count: int = 5) -> tuple[Finding, ...]:
        """Returns the tensors with the worst verdicts, each where it is worst; of the first failing rung, if any."""
        order = list(Verdict)
        rung = self.first_failure
        findings = [f for f in rung.findings if not f.verdict.ok] if rung else self.findings
        ranked = sorted(findings, key=lambda f: (order.index(f.verdict), _excess(f)), reverse=True)
        distinct = {(f.rung, f.name, f.side): f for f in reversed(ranked)}
        return tuple(f for f in ranked if distinct[f.rung, f.name, f.side] is f)[:count]

    def to_dict(self) -> dict[str, Any]:
        """Returns strict JSON's types; infinite values are the string "inf"."""
        rungs = [{**asdict(r), "verdict": r.verdict, "worst": r.worst and r.worst.name} for r in self.rungs]
        first = self.first_failure
        head = {"format": REPORT_FORMAT, "ok": self.ok, "first_failure": first.name if first else None}
        return jsonable({**head, **asdict(self), "rungs": rungs})
