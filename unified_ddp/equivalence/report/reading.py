"""What the numbers of a failing rung look like: each sentence says what was seen, and then what that often means."""

import math
from collections import Counter
from collections.abc import Sequence

from unified_ddp.equivalence.report.labels import side_names, tensors
from unified_ddp.equivalence.results import Finding, Results, Rung, Verdict

_EQUAL = 1e-3
"""Relative difference up to which two ratios are the same number."""
_FEW = 0.05
"""Share of elements up to which a difference is called isolated."""


def readings(report: Results) -> list[str]:
    """Returns likely readings of the first failing rung, the most telling first; empty if nothing failed."""
    rung = report.first_failure
    if rung is None:
        return []
    bad = [f for f in rung.findings if f.verdict is rung.verdict]
    bad = [f for f in bad if f.side is not None] or bad  # a side off its own oracle is off the other side as well
    if rung.verdict is Verdict.PRECISION:
        return _of_precision(report)
    return [*_of_reduction(bad), *_of_ratios(rung, bad, report), *_of_spread(rung, bad)]


def _of_precision(report: Results) -> list[str]:
    flags = [
        f"{side.framework}: {name} {value}" for side in report.sides for name, value in side.flags.items() if value
    ]
    settings = f" Settings that matter: {'; '.join(flags)}." if flags else ""
    return [f"float64 agrees, so the programs are one; {report.dtype} rounds differently in them.{settings}"]


def _of_reduction(bad: Sequence[Finding]) -> list[str]:
    """A side that differs from its own oracle: the model has no part in it."""
    texts = []
    for side in sorted({f.side for f in bad if f.side is not None}):
        own = [f for f in bad if f.side == side]
        ranks = sorted({f.rank for f in own if f.rank is not None})
        buckets = sorted({f.bucket for f in own if f.bucket is not None})
        texts.append(
            f"{side} differs from the mean of its own ranks' gradients (ranks {_listed(ranks)}, buckets "
            f"{_listed(buckets)}): its reduction is wrong, whatever the model is."
        )
    return texts


def _of_ratios(rung: Rung, bad: Sequence[Finding], report: Results) -> list[str]:
    known = [f for f in bad if f.ratio is not None]
    if len(known) < 2:  # one number is always a multiple of another
        return _of_notes(bad)
    ratio = _median([f.ratio for f in known if f.ratio is not None])
    alike = [f for f in known if f.ratio is not None and math.isclose(f.ratio, ratio, rel_tol=_EQUAL)]
    if len(alike) < 2:
        return _of_notes(bad)
    names, of = tensors(alike), tensors(rung.findings)
    second = side_names(report)[1] if bad[0].side is None else bad[0].side
    where = (
        "at every step" if of == 1 else f"in every {alike[0].kind}" if names == of else f"in {names} of {of} tensors"
    )
    meaning = _meaning(ratio, report.ranks, names == of, rung.name)
    text = f"{second} is {_told(ratio)} times the other {where}"
    rest = [f for f in bad if f not in alike]
    return [f"{text}{f': {meaning}' if meaning else ''}.", *_of_notes(rest)]


def _told(ratio: float) -> str:
    """Returns a ratio, with the fraction that it is if that is one over a whole number."""
    whole = round(1 / ratio)
    fraction = f" (1/{whole})" if abs(whole) > 1 and math.isclose(ratio, 1 / whole, rel_tol=_EQUAL) else ""
    return f"{ratio:.6g}{fraction}"


def _meaning(ratio: float, ranks: int, everywhere: bool, rung: str) -> str:
    if ranks > 1 and rung == "reduced":
        for value, text in ((float(ranks), "a sum over ranks for a mean"), (1 / ranks, "divided by the ranks twice")):
            if math.isclose(ratio, value, rel_tol=_EQUAL):
                return f"{ranks} ranks, so {text}" if value > 1 else f"1/{ranks} ranks, so {text}"
    if math.isclose(ratio, -1, rel_tol=_EQUAL):
        return "the sign is turned"
    if everywhere and rung in ("loss", "gradients", "reduced"):
        return "one factor on all of them is a factor on the loss (mean for sum, another divisor)"
    power = math.log2(abs(ratio))
    if abs(power - round(power)) < _EQUAL and abs(power) >= 1:
        return f"a power of two (2^{round(power)})"
    return "a scale that one side has and the other has not"


def _of_notes(bad: Sequence[Finding]) -> list[str]:
    """What single findings say of themselves, most frequent first."""
    counted = Counter(f.note for f in bad if f.note)
    texts = []
    for note, _ in counted.most_common(3):
        names = list(dict.fromkeys(f.name for f in bad if f.note == note))
        texts.append(f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}: {note}.")
    return texts


def _of_spread(rung: Rung, bad: Sequence[Finding]) -> list[str]:
    texts = []
    steps = sorted({f.step for f in bad})
    if len({f.step for f in rung.findings}) > 1 and steps[0] > 0:
        texts.append(f"steps 0 to {steps[0] - 1} agree, step {steps[0]} is the first that differs.")
    few = [f for f in bad if f.decisive and 0 < f.decisive.share_over <= _FEW]
    if few and len(few) == len(bad):
        worst = few[0].decisive
        assert worst is not None
        texts.append(
            f"only {100 * worst.share_over:.2g} % of the elements of {few[0].name} are over their tolerance, the worst "
            f"at {list(worst.where)}: isolated elements, such as a padded row, a border, a tie in a maximum."
        )
    return texts


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values)) or "none"
