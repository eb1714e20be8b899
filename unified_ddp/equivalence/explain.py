"""A report as plain text, for assertion messages and logs: names in full, no colours, no width."""

from unified_ddp.equivalence.report.labels import (
    LABELS,
    distinct_sides,
    excess_text,
    facts,
    headline,
    number,
    side_text,
    untested_reason,
)
from unified_ddp.equivalence.report.reading import readings
from unified_ddp.equivalence.results import Finding, Results, Rung

_LISTED = 20


def explain(report: Results) -> str:
    """Returns verdict, ladder, worst tensors of the first failing rung, what was not tested, versions."""
    verdict, sentence = headline(report)
    lines = [f"{LABELS[verdict].upper()}: {sentence}", facts(report), "", *map(_rung, report.rungs)]
    if report.first_failure is not None:
        lines += ["", f"worst of {report.first_failure.name}:", *(f"  {_finding(f)}" for f in report.worst())]
    told = readings(report)
    if told:
        lines += ["", *(f"reading: {text}" for text in told)]
    if report.not_tested:
        lines += ["", f"not tested ({len(report.not_tested)}):"]
        lines += [f"  {item.name}: {item.reason}" for item in report.not_tested[:_LISTED]]
        lines += [f"  and {len(report.not_tested) - _LISTED} more"] * (len(report.not_tested) > _LISTED)
    lines += ["", *(f"note: {note}" for note in report.notes)] if report.notes else []
    return "\n".join([*lines, "", *(line for side in distinct_sides(report) for line in side_text(side))])


def _rung(rung: Rung) -> str:
    worst, reason = rung.worst, untested_reason(rung)
    told = f"  ({reason})" if reason else f"  worst {worst.name}, {excess_text(worst)} x its tolerance" if worst else ""
    return f"{rung.name:10} {LABELS[rung.verdict]:11}{told}".rstrip()


def _finding(finding: Finding) -> str:
    names = finding.name
    if finding.counterparts and finding.counterparts != (finding.name,):
        names += f" ~ {', '.join(finding.counterparts)}"
    places = [f"step {finding.step}"] if finding.rank is None else [f"{finding.side or ''} rank {finding.rank}".strip()]
    if finding.bucket is not None:
        places.append(f"bucket {finding.bucket}")
    text = f"{LABELS[finding.verdict]:11} {names} ({', '.join(places)})"
    measure = finding.decisive
    if measure is not None:
        text += (
            f": {measure.dtype} difference {number(measure.difference)} of scale {number(measure.scale)} at "
            f"{list(measure.where)}, {number(measure.excess)} x its tolerance, {number(measure.max_ulp)} ULP"
        )
    return f"{text}; {finding.note}" if finding.note else text
