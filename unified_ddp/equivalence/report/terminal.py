"""A report as one screen of a terminal. At 60 columns names are cut in the middle, numbers and verdicts never."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from unified_ddp.equivalence.report.labels import (
    COLOURS,
    LABELS,
    distinct_sides,
    excess_text,
    facts,
    headline,
    number,
    shortened,
    side_text,
    tensors,
    untested_reason,
)
from unified_ddp.equivalence.report.reading import readings
from unified_ddp.equivalence.results import Finding, Results, Rung, Verdict

_WIDE = 92
"""From this width on, a tensor's counterpart fits beside it."""
_MEDIUM = 72
"""From this width on, the step or rank does."""
_LISTED = 8
_GAP = 2


def print_report(report: Results, console: Console, worst: int = 5) -> None:
    """Prints verdict, ladder, worst tensors, what was not tested, versions and settings."""
    verdict, sentence = headline(report)
    console.print(Text(f"{LABELS[verdict].upper()}  {sentence}", style=f"bold {COLOURS[verdict]}"))
    console.print(Text(facts(report)), highlight=False)
    console.print()
    console.print(_ladder(report, console.width))
    if report.first_failure is not None:
        console.print()
        console.print(Text(f"Worst of {report.first_failure.name}", style="bold"))
        console.print(_worst(report.worst(worst), console.width))
    for text in readings(report):
        console.print(Text(f"→ {text}" if _unicode(console) else f"> {text}"))
    _print_not_tested(report, console)
    console.print()
    for note in report.notes:
        console.print(Text(f"note: {note}", style="yellow"))
    for side in distinct_sides(report):
        for line in side_text(side):
            console.print(Text(line, style="dim"))


def _ladder(report: Results, width: int) -> Table:
    rows = [_rung_cells(rung) for rung in report.rungs]
    return _table(("rung", "n", "worst", "x tol", "verdict"), rows, width, names=("worst",), left=("rung", "verdict"))


def _rung_cells(rung: Rung) -> tuple[str, str, str, str, Text]:
    worst = rung.worst
    reason = untested_reason(rung)
    name = reason or (worst.name if worst else "")
    return (
        rung.name,
        str(tensors(rung.findings) or ""),
        name,
        excess_text(worst) if worst and not reason else "",
        _chip(rung.verdict),
    )


def _worst(findings: Sequence[Finding], width: int) -> Table:
    columns: dict[str, Sequence[str | Text]] = {
        "tensor": [f.name for f in findings],
        "counterpart": [", ".join(f.counterparts) for f in findings],
        "bucket": ["-" if f.bucket is None else str(f.bucket) for f in findings],
        "place": [_place(f) for f in findings],
        "diff": [number(f.decisive.difference if f.decisive else None) for f in findings],
        "x tol": [excess_text(f) for f in findings],
        "verdict": [_chip(f.verdict) for f in findings],
    }
    dropped = {"counterpart"} if width < _WIDE else set()
    dropped |= {"place"} if width < _MEDIUM and not any(f.side for f in findings) else set()
    heads = [head for head in columns if head not in dropped]
    rows = list(zip(*(columns[head] for head in heads), strict=True))
    return _table(heads, rows, width, names=("tensor", "counterpart"), left=("verdict", "place"))


def _place(finding: Finding) -> str:
    if finding.rank is None:
        return f"step {finding.step}"
    return f"{finding.side or 'rank'} {finding.rank}"


def _chip(verdict: Verdict) -> Text:
    return Text(LABELS[verdict], style=COLOURS[verdict])


def _table(
    heads: Sequence[str], rows: Sequence[Sequence[str | Text]], width: int, names: Sequence[str], left: Sequence[str]
) -> Table:
    """Returns a table in which only the columns of names give way."""
    sizes = [max([len(head), *(len(row[i]) for row in rows)]) for i, head in enumerate(heads)]
    flexible = [i for i, head in enumerate(heads) if head in names]
    spare = width - sum(sizes[i] + _GAP for i in range(len(heads)) if i not in flexible) - _GAP * len(flexible)
    budget = _shared([sizes[i] for i in flexible], spare)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, _GAP - 1, 0, 0), pad_edge=False)
    for i, head in enumerate(heads):
        text = head in names or head in left
        size = budget[flexible.index(i)] if i in flexible else sizes[i]
        table.add_column(head, justify="left" if text else "right", no_wrap=True, width=max(size, 1))
    for row in rows:
        cells = [shortened(str(c), budget[flexible.index(i)]) if i in flexible else c for i, c in enumerate(row)]
        table.add_row(*(escape(c) if isinstance(c, str) else c for c in cells))
    return table


def _shared(wanted: Sequence[int], spare: int) -> list[int]:
    """Returns widths that sum to at most `spare`: the smallest wish first, the others share what is left."""
    given = [0] * len(wanted)
    left = max(spare, 0)
    for place, i in enumerate(sorted(range(len(wanted)), key=lambda i: wanted[i])):
        given[i] = min(wanted[i], left // (len(wanted) - place))
        left -= given[i]
    return given


def _print_not_tested(report: Results, console: Console) -> None:
    if not report.not_tested:
        return
    console.print()
    console.print(Text(f"Not tested: {len(report.not_tested)} tensors", style="bold"))
    for item in report.not_tested[:_LISTED]:
        console.print(Text(f"  {item.name}: {item.reason}"))
    if len(report.not_tested) > _LISTED:
        console.print(Text(f"  and {len(report.not_tested) - _LISTED} more"))


def _unicode(console: Console) -> bool:
    return (console.encoding or "").lower().startswith("utf")
