"""Words, colours and numbers of a report, the same wherever it is shown."""

import math
from collections.abc import Iterable

from unified_ddp.equivalence.results import Finding, Results, Rung, SideInfo, Verdict

LABELS = {
    Verdict.PASS: "pass",
    Verdict.ZERO: "zero",
    Verdict.NOT_TESTED: "not tested",
    Verdict.CONSEQUENCE: "consequence",
    Verdict.PRECISION: "PRECISION",
    Verdict.DIFFERS: "DIFFERS",
}
"""No wider than a narrow terminal's last column."""

COLOURS = {
    Verdict.PASS: "#1a7f37",
    Verdict.ZERO: "#4f9d8f",
    Verdict.NOT_TESTED: "#8b949e",
    Verdict.CONSEQUENCE: "#8250df",
    Verdict.PRECISION: "#bf8700",
    Verdict.DIFFERS: "#cf222e",
}


def headline(report: Results) -> tuple[Verdict, str]:
    """Returns the report's verdict and one sentence that says it."""
    first, second = side_names(report)
    failing = report.first_failure
    if failing is not None:
        bad = [f for f in failing.findings if f.verdict is failing.verdict]
        total = tensors(failing.findings)
        count = f" ({tensors(bad)} of {total} tensors)" if total > 1 else ""
        if failing.verdict is Verdict.PRECISION:
            return (
                failing.verdict,
                f"one program, other rounding: {failing.name} apart in {report.dtype}, equal in float64{count}",
            )
        own = sorted({f.side for f in bad if f.side is not None})
        if own:
            return failing.verdict, f"{' and '.join(own)}: {failing.name} gradients are not the mean over ranks{count}"
        return failing.verdict, f"{first} and {second} differ, first at {failing.name}{count}"
    if report.ok and all(f.side is not None for f in report.findings):
        return Verdict.PASS, f"{report.sides[0].framework}: {report.until} gradients are the mean over ranks"
    if report.ok:
        return Verdict.PASS, f"{first} and {second} agree, up to {report.until}"
    missing = [rung.name for rung in report.rungs if not rung.verdict.ok]
    return Verdict.NOT_TESTED, f"no difference found, but not tested: {', '.join(missing) or 'every rung'}"


def tensors(findings: Iterable[Finding]) -> int:
    """Returns of how many tensors these findings are."""
    return len({f.name for f in findings})


def untested_reason(rung: Rung) -> str:
    """Returns why a rung has no verdict; "" if it has one or nothing is known."""
    if rung.verdict is not Verdict.NOT_TESTED:
        return ""
    return rung.note or next((f.note for f in rung.findings if f.note), "")


def side_names(report: Results) -> tuple[str, str]:
    """Returns the sides' frameworks, told apart where they are one."""
    first, second = (side.framework for side in report.sides)
    return (first, second) if first != second else (f"the first {first}", f"the second {second}")


def facts(report: Results) -> str:
    """Returns what the comparison was run with, in one line."""
    parts = [report.dtype, f"weights {report.weights}, seed {report.seed}"]
    run = {rung.name for rung in report.rungs if rung.findings}
    if "reduced" in run:
        parts.append(f"{report.ranks} ranks")
    if run & {"steps", "curve"}:
        parts.append(f"{report.steps} steps")
    return ", ".join([*parts, f"{report.seconds:.1f} s"])


def distinct_sides(report: Results) -> tuple[SideInfo, ...]:
    """Returns the sides, once where they are one."""
    first, second = report.sides
    return (first,) if first == second else (first, second)


def side_text(side: SideInfo) -> tuple[str, str]:
    """Returns a side's versions and sizes, and its settings."""
    versions = ", ".join(f"{name} {version}" for name, version in side.versions.items())
    size = f"{side.parameters:,} parameters in {side.tensors} tensors on {', '.join(side.devices)}"
    return f"{versions}; {size}", ", ".join(f"{name} {value}" for name, value in side.flags.items() if value)


def number(value: float | None) -> str:
    """Returns a number in at most 7 characters; "-" for none."""
    if value is None:
        return "-"
    if math.isnan(value) or math.isinf(value):
        return str(value)
    if value == 0:
        return "0"
    return (
        f"{value:.2g}"
        if 0.01 <= abs(value) < 100
        else f"{value:.1e}"
        if abs(value) < 0.01 or abs(value) >= 1e4
        else f"{value:.0f}"
    )


def excess_text(finding: Finding) -> str:
    """Returns how many times its tolerance a finding's difference is."""
    return number(finding.decisive.excess if finding.decisive else None)


def shortened(name: str, width: int) -> str:
    """Returns a name in at most `width` characters: what is cut is in the middle, as both ends tell tensors apart."""
    if len(name) <= width:
        return name
    if width < 5:
        return name[-max(width, 0) :] if width > 0 else ""
    tail = min((2 * (width - 1)) // 3, width - 2)
    return f"{name[: width - 1 - tail]}…{name[-tail:]}"
