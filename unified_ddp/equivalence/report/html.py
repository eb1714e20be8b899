"""A report as one HTML file that needs no other: no script, no font, no picture from elsewhere."""

import io
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.util import find_spec

from unified_ddp.equivalence.report.figures import WIDTH, Chart, charts_of
from unified_ddp.equivalence.report.labels import (
    COLOURS,
    LABELS,
    distinct_sides,
    excess_text,
    facts,
    headline,
    number,
    side_text,
    tensors,
    untested_reason,
)
from unified_ddp.equivalence.report.reading import readings
from unified_ddp.equivalence.results import Finding, Results, Rung, Verdict

_HEAT_ROWS = 300
_TENSOR_ROWS = 2000

_STYLE = """
:root{color-scheme:light}
*{box-sizing:border-box}
body{margin:0;padding:24px;font:14px/1.45 system-ui,sans-serif;color:#1f2328;background:#fff;max-width:1320px}
h1{font-size:20px;margin:0 0 2px}
h2{font-size:15px;margin:28px 0 8px}
p{margin:4px 0}
.dim{color:#57606a}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:3px 14px 3px 0;border-bottom:1px solid #eaeef2;vertical-align:top;white-space:nowrap}
th{font-weight:600;color:#57606a}
td.n,th.n{text-align:right}
td.t{white-space:normal;overflow-wrap:anywhere;min-width:9em}
.v{color:#fff;border-radius:4px;padding:1px 7px;font-size:12px;white-space:nowrap}
.charts{columns:2 460px;column-gap:28px}
figure{margin:0;break-inside:avoid}
figcaption{font-weight:600;margin:0 0 4px;padding-top:18px}
svg{display:block;width:100%;height:auto;max-width:680px}
summary{cursor:pointer;font-weight:600;margin-top:22px}
ul{margin:4px 0;padding-left:20px}
@media(max-width:600px){body{padding:12px}th,td{padding-right:9px}}
"""


def report_to_html(report: Results) -> str:
    """Returns the page. Without matplotlib it has no charts, and says so."""
    verdict, sentence = headline(report)
    parts = [
        f"<h1>{_chip(verdict)} {escape(sentence)}</h1>",
        f'<p class="dim">{escape(facts(report))}</p>',
        "<h2>Ladder</h2>",
        _table(("rung", "verdict", "worst tensor", "#/ tolerance", "#tensors", "#s"), map(_rung, report.rungs)),
        *_failure(report),
        *_not_tested(report),
        *(f'<p class="dim">Note: {escape(note)}</p>' for note in report.notes),
        *_charts(report),
        _all_findings(report),
        _mapping(report),
        "<h2>Versions and settings</h2>",
        *(
            f"<p>{escape(versions)}<br><span class=dim>{escape(flags)}</span></p>"
            for versions, flags in map(side_text, distinct_sides(report))
        ),
    ]
    title = escape(f"{LABELS[verdict]}: {sentence}")
    viewport = '<meta name="viewport" content="width=device-width,initial-scale=1">'
    head = f'<meta charset="utf-8">{viewport}<title>{title}</title>'
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n'
    )


def _chip(verdict: Verdict) -> str:
    return f'<span class="v" style="background:{COLOURS[verdict]}">{LABELS[verdict]}</span>'


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table. Heads that begin with # have numbers below them; cells are HTML."""
    number = [head.startswith("#") for head in heads]
    text = {
        i for i, head in enumerate(heads) if ("tensor" in head and not number[i]) or head in ("reason", "rule", "note")
    }

    def kind(i: int) -> str:
        return ' class="n"' if number[i] else ' class="t"' if i in text else ""

    top = "".join(
        f"<th{' class=n' if number[i] else ''}>{escape(head.removeprefix('#'))}</th>" for i, head in enumerate(heads)
    )
    lines = ("<tr>" + "".join(f"<td{kind(i)}>{cell}</td>" for i, cell in enumerate(row)) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _rung(rung: Rung) -> Sequence[str]:
    worst, reason = rung.worst, untested_reason(rung)
    name = f'<span class="dim">{escape(reason)}</span>' if reason else _name(worst.name) if worst else ""
    excess = excess_text(worst) if worst and not reason else ""
    return rung.name, _chip(rung.verdict), name, excess, str(tensors(rung.findings)), f"{rung.seconds:.1f}"


def _name(text: str) -> str:
    """Returns a tensor's name, which may be broken after its dots."""
    return escape(text).replace(".", ".<wbr>")


_FINDING_HEADS = (
    "verdict",
    "tensor",
    "tensor of the second side",
    "place",
    "#bucket",
    "#/ tolerance",
    "#difference",
    "#scale",
    "#ULP",
)


def _finding(finding: Finding) -> list[str]:
    measure = finding.decisive
    place = f"step {finding.step}" if finding.rank is None else f"{finding.side or 'rank'} {finding.rank}"
    numbers = (measure.excess, measure.difference, measure.scale, measure.max_ulp) if measure else (None,) * 4
    return [
        _chip(finding.verdict),
        _name(finding.name),
        _name(", ".join(finding.counterparts)),
        escape(place),
        "" if finding.bucket is None else str(finding.bucket),
        *(number(n) for n in numbers),
    ]


def _failure(report: Results) -> list[str]:
    if report.first_failure is None:
        return []
    worst = report.worst()
    noted = any(f.note for f in worst)
    rows = ([*_finding(f), *((escape(f.note),) * noted)] for f in worst)
    told = "".join(f"<li>{escape(text)}</li>" for text in readings(report))
    return [
        f"<h2>First failing rung: {escape(report.first_failure.name)}</h2>",
        _table((*_FINDING_HEADS, *(("note",) * noted)), rows),
        f"<ul>{told}</ul>" if told else "",
    ]


def _not_tested(report: Results) -> list[str]:
    if not report.not_tested:
        return []
    rows = ((_name(i.name), _name(", ".join(i.counterparts)), escape(i.reason)) for i in report.not_tested)
    return [
        f"<h2>Not tested: {len(report.not_tested)} tensors</h2>",
        _table(("tensor", "tensor of the second side", "reason"), rows),
    ]


def _charts(report: Results) -> list[str]:
    if find_spec("matplotlib") is None:
        return ['<p class="dim">Charts are left out, as matplotlib was not installed.</p>']
    charts = charts_of(report, _HEAT_ROWS)
    figures = (f"<figure><figcaption>{escape(c.title)}</figcaption>{_svg(c, i)}</figure>" for i, c in enumerate(charts))
    return ['<div class="charts">', *figures, "</div>"]


def _svg(chart: Chart, index: int) -> str:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from unified_ddp.equivalence.report.charts import FONT

    # A salt of its own keeps the identifiers of several charts in one page apart, and equal from run to run.
    with rc_context({**FONT, "svg.hashsalt": f"chart {index}"}):
        figure = Figure(figsize=(WIDTH, chart.height), layout="constrained")
        chart.draw(figure.add_subplot())
        stream = io.StringIO()
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    svg = text[text.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns:xlink="[^"]*"| xmlns="[^"]*"', "", svg).replace("xlink:href", "href")
    used = set(re.findall(r'(?:href="#|url\(#)([^")]*)', svg))
    svg = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", svg)
    label = escape(chart.title, quote=True)
    return re.sub(r'<svg ([^>]*?)width="[^"]*"', rf'<svg role="img" aria-label="{label}" \1', svg, count=1).replace(
        f'height="{chart.height * 72:g}pt"', "", 1
    )


def _all_findings(report: Results) -> str:
    findings = report.findings
    rows = ([f.rung, *_finding(f)] for f in findings[:_TENSOR_ROWS])
    some = f", the first {_TENSOR_ROWS}" if len(findings) > _TENSOR_ROWS else ""
    table = _table(("rung", *_FINDING_HEADS), rows)
    return f"<details><summary>Everything that was compared ({len(findings)}{some})</summary>{table}</details>"


def _mapping(report: Results) -> str:
    table = _table(("tensor of the second side", "rule"), ((_name(n), _name(r)) for n, r in report.mapping.items()))
    return f"<details><summary>Mapping ({len(report.mapping)} tensors)</summary>{table}</details>"
