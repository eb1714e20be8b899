"""Which charts a report has, with their titles and sizes; a chart of which nothing is known is left out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unified_ddp.equivalence.report import charts
from unified_ddp.equivalence.report.labels import side_names
from unified_ddp.equivalence.results import Results, Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes


WIDTH = 6.2
"""Inches. Narrow, so that texts stay readable where a page shows charts smaller than they are."""


@dataclass(frozen=True)
class Chart:
    """One drawing.

    Attributes:
        title: above it.
        height: in inches.
        draw: draws it on axes.
    """

    title: str
    height: float
    draw: Callable[["Axes"], None]


def charts_of(report: Results, rows: int) -> list[Chart]:
    """Returns the charts of a report.

    Args:
        report: what to draw.
        rows: of the heat map at most; the worst are kept.
    """
    found: list[Chart] = []
    cells = charts.heat_cells(report)
    total = len(cells.names)
    cells = cells.only_worst(rows)
    if cells.names:
        some = f" (the worst {rows} of {total})" if total > rows else ""
        height = 1.1 + 0.16 * len(cells.names)
        found.append(Chart(f"Error by parameter and step{some}", height, lambda axes: charts.draw_heat(axes, cells)))
    ulps = charts.ulp_rows(report)
    if ulps:
        found.append(Chart("Distance in ULP", 2.7, lambda axes: charts.draw_ulps(axes, ulps, report.dtype)))
    if report.curve is not None:
        curve, names = report.curve, side_names(report)
        found.append(Chart("Training curves", 2.7, lambda axes: charts.draw_curve(axes, curve, names)))
    if report.buckets:
        height = 0.9 + 0.28 * len(report.buckets)
        verdicts = _reduced_verdicts(report)
        found.append(Chart("Bucket plan, to scale", height, lambda a: charts.draw_buckets(a, report.buckets, verdicts)))
    if report.timeline:
        height = 0.9 + 0.5 * len({(t.side, t.rank) for t in report.timeline})
        title = "Backward and all-reduce by bucket"
        found.append(Chart(title, height, lambda axes: charts.draw_timeline(axes, report)))
    return found


def _reduced_verdicts(report: Results) -> dict[str, Verdict]:
    order = list(Verdict)
    found: dict[str, Verdict] = {}
    for finding in report.findings:
        if finding.rung == "reduced":
            found[finding.name] = max(found.get(finding.name, Verdict.PASS), finding.verdict, key=order.index)
    return found
