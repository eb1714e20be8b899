"""A report as one picture: ladder and worst tensors beside the charts."""

from pathlib import Path
from typing import TYPE_CHECKING

from unified_ddp.equivalence.report.charts import FONT, require_matplotlib
from unified_ddp.equivalence.report.figures import WIDTH, charts_of
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
    untested_reason,
)
from unified_ddp.equivalence.results import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_ROWS = 40
_LINE = 0.21
_DPI = 130


def draw_report(report: Results, path: Path) -> None:
    """Writes a PNG.

    Raises:
        EquivalenceError: matplotlib is not installed.
    """
    require_matplotlib(f"report {path}")
    from matplotlib import rc_context

    with rc_context(FONT):
        _draw(report, path)


def _draw(report: Results, path: Path) -> None:
    from matplotlib.figure import Figure

    charts = charts_of(report, _ROWS)
    texts = _texts(report)
    heights = [*(_LINE * len(texts) + 0.1,), *(chart.height + 0.4 for chart in charts)]
    columns = _columns(heights)
    tall = max(sum(heights[i] for i in column) for column in columns)
    figure = Figure(figsize=(WIDTH * len(columns) + 0.3, tall + 0.9), layout="constrained", facecolor="white")
    verdict, sentence = headline(report)
    figure.suptitle(f"{LABELS[verdict].upper()}  {sentence}", color=COLOURS[verdict], fontweight="bold", fontsize=12)
    for part, column in zip(figure.subfigures(1, len(columns), squeeze=False)[0], columns, strict=True):
        left = tall - sum(heights[i] for i in column)
        ratios = [*(heights[i] for i in column), *((left,) if left > 0.05 else ())]
        grid = part.add_gridspec(len(ratios), 1, height_ratios=ratios)
        for row, i in enumerate(column):
            axes = part.add_subplot(grid[row])
            if i == 0:
                _write(axes, texts)
            else:
                axes.set_title(charts[i - 1].title, fontsize=10, loc="left", pad=52 if i == 1 else 6)
                charts[i - 1].draw(axes)
        if len(ratios) > len(column):
            part.add_subplot(grid[-1]).axis("off")
    figure.savefig(path, dpi=_DPI)


def _columns(heights: list[float]) -> list[list[int]]:
    """Shares texts (0) and charts between two columns, each next one where there is more room."""
    columns: list[list[int]] = [[], []]
    filled = [0.0, 0.0]
    for i, height in enumerate(heights):
        shortest = filled.index(min(filled))
        columns[shortest].append(i)
        filled[shortest] += height
    return [column for column in columns if column]


Line = list[tuple[float, str, str]]
"""Pieces of a line: where each begins, 0 to 1, its text and its colour."""


def _texts(report: Results) -> list[Line]:
    lines: list[Line] = [[(0, facts(report), "#57606a")], []]
    for rung in report.rungs:
        worst, reason = rung.worst, untested_reason(rung)
        name = shortened(reason, 50) if reason else shortened(worst.name, 40) if worst else ""
        excess = excess_text(worst) + " x tol" if worst and not reason else ""
        chip = (0.83, LABELS[rung.verdict], COLOURS[rung.verdict])
        lines.append([(0, rung.name, "black"), (0.15, name, "#57606a"), (0.66, excess, "#57606a"), chip])
    if report.first_failure is not None:
        lines += [[], [(0, f"Worst of {report.first_failure.name}", "black")]]
        for f in report.worst():
            difference = number(f.decisive.difference if f.decisive else None)
            place = f"bucket {f.bucket}" if f.bucket is not None else ""
            pieces = [(0.02, shortened(f.name, 40), "black"), (0.5, place, "#57606a"), (0.66, difference, "#57606a")]
            lines.append([*pieces, (0.83, excess_text(f) + " x tol", COLOURS[f.verdict])])
    if report.not_tested:
        names = ", ".join(item.name for item in report.not_tested)
        lines += [[], [(0, f"Not tested ({len(report.not_tested)}): {shortened(names, 80)}", "#57606a")]]
    lines.append([])
    lines += [[(0, shortened(text, 100), "#57606a")] for side in distinct_sides(report) for text in side_text(side)]
    return lines


def _write(axes: "Axes", lines: list[Line]) -> None:
    axes.axis("off")
    for row, pieces in enumerate(lines):
        for left, text, colour in pieces:
            place = 1 - (row + 0.5) / len(lines)
            axes.text(
                left, place, text, color=colour, fontsize=7.5, va="center", transform=axes.transAxes, parse_math=False
            )
