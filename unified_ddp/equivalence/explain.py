"""A report as plain text, for assertion messages and logs."""

from unified_ddp.equivalence.results import Finding, Report, Verdict

__all__ = ["explain"]


def explain(report: Report) -> str:
    """Returns the ladder, the first failing rung with its worst tensors, and what was not tested."""
    lines = [f"{rung.name:10} {rung.verdict}{f' ({rung.note})' if rung.note else ''}" for rung in report.rungs]
    first = report.first_failure
    if first is not None:
        lines += ["", f"first rung that fails: {first.name}; worst of it:"]
        lines += [f"  {_row(f)}" for f in report.worst() if f.verdict in (Verdict.DIFFERS, Verdict.PRECISION)]
    if report.not_tested:
        lines += ["", f"not tested ({len(report.not_tested)}):"]
        lines += [f"  {item.name}: {item.reason}" for item in report.not_tested]
    lines += [f"note: {note}" for note in report.notes]
    return "\n".join(lines)


def _row(finding: Finding) -> str:
    names = finding.name
    if finding.counterparts and finding.counterparts != (finding.name,):
        names += f" ~ {', '.join(finding.counterparts)}"
    place = "".join(
        f", {what} {value}"
        for what, value in (("side", finding.side), ("rank", finding.rank), ("bucket", finding.bucket))
        if value is not None
    )
    measure = finding.decisive
    numbers = ""
    if measure is not None:
        numbers = f": {measure.dtype} difference {measure.difference:.2g}, {measure.excess:.2g} times its tolerance"
        numbers += f" at {list(measure.where)}, scale {measure.scale:.2g}, {measure.max_ulp:.3g} ULP"
    note = f"; {finding.note}" if finding.note else ""
    return f"[{finding.verdict}] {finding.kind} {names}{place}, step {finding.step}{numbers}{note}"
