"""Drawings of a report by matplotlib, each on the axes that it is given; the HTML file and the PNG show the same."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from unified_ddp.equivalence.errors import EquivalenceError
from unified_ddp.equivalence.report.labels import COLOURS, LABELS, shortened
from unified_ddp.equivalence.results import BucketRow, Curve, Finding, Results, Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes


FIRST, SECOND = "#0969da", "#d1600a"
_KINDS = ("gradient", "parameter")
_DECADES = 3.0
"""Of the heat map's colours, on either side of the tolerance."""
_NAME = 34
_LABELLED = 24
"""Steps whose numbers fit below the heat map."""
_CROWDED = 0.2
"""Share of the heat map's width below which a rung's name does not fit above its steps."""
FONT: dict[Any, Any] = {"font.size": 8, "axes.titlesize": 10, "svg.fonttype": "none"}
"""For matplotlib's `rc_context`. Texts stay texts in SVG, which makes files small and searchable."""


def require_matplotlib(what: str) -> None:
    """Raises EquivalenceError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise EquivalenceError(f"{what} needs matplotlib; run: pip install matplotlib") from error


class Cells:
    """The heat map's numbers.

    Attributes:
        names: of parameters, one a row.
        columns: rung and step, one a column.
        excess: difference / tolerance by row and column, the worst over ranks; NaN where nothing was compared.
    """

    def __init__(self, findings: Sequence[Finding]) -> None:
        chosen = [f for f in findings if f.kind in _KINDS and f.decisive is not None]
        self.names = list(dict.fromkeys(f.name for f in chosen))
        self.columns = list(dict.fromkeys((f.rung, f.step) for f in chosen))
        self.excess = np.full((len(self.names), len(self.columns)), np.nan)
        rows = {name: i for i, name in enumerate(self.names)}
        places = {column: i for i, column in enumerate(self.columns)}
        for f in chosen:
            at = rows[f.name], places[f.rung, f.step]
            excess = f.decisive.excess if f.decisive else math.nan
            self.excess[at] = np.fmax(self.excess[at], excess)

    def only_worst(self, count: int) -> "Cells":
        """Returns the same with at most `count` rows, those with the largest excess, in their order."""
        if len(self.names) > count:
            with np.errstate(all="ignore"):
                worst = np.sort(np.argsort(-np.nan_to_num(self.excess, nan=-1.0).max(axis=1), kind="stable")[:count])
            self.names, self.excess = [self.names[i] for i in worst], self.excess[worst]
        return self


def heat_cells(report: Results) -> Cells:
    """Returns the errors of gradients and parameters by step."""
    return Cells(report.findings)


def draw_heat(axes: "Axes", cells: Cells) -> None:
    """Draws errors by parameter (down), rung and step (across): white is the tolerance, red over it, blue under it."""
    from matplotlib import colormaps
    from matplotlib.colors import Normalize

    with np.errstate(divide="ignore"):
        shown = np.clip(np.log10(cells.excess), -_DECADES, _DECADES)
    colours = colormaps["RdBu_r"].with_extremes(bad="#d0d7de")  # bad: what was not compared
    mesh = axes.pcolormesh(
        np.ma.masked_invalid(shown),
        cmap=colours,
        norm=Normalize(-_DECADES, _DECADES),
        edgecolors="white",
        linewidth=0.6,
    )
    axes.invert_yaxis()
    axes.set_yticks(np.arange(len(cells.names)) + 0.5, [shortened(n, _NAME) for n in cells.names], fontsize=7)
    axes.set_xticks(np.arange(len(cells.columns)) + 0.5, _step_labels(cells.columns), fontsize=7)
    axes.set_xlabel("step")
    _name_rungs(axes, [rung for rung, _ in cells.columns])
    bar = axes.figure.colorbar(mesh, ax=axes, pad=0.02, aspect=30, ticks=[-3, -2, -1, 0, 1, 2, 3])
    bar.ax.set_yticklabels(["≤ 0.001", "0.01", "0.1", "1", "10", "100", "≥ 1000"], fontsize=7)
    bar.set_label("difference / tolerance", fontsize=8)


def _step_labels(columns: Sequence[tuple[str, int]]) -> list[str]:
    """Returns the steps' numbers, of many only some."""
    every = 1 + len(columns) // _LABELLED
    return [str(step) if step % every == 0 else "" for _, step in columns]


def _name_rungs(axes: "Axes", rungs: Sequence[str]) -> None:
    """Names each group of columns above it and draws a line between groups."""
    start = 0
    narrowest = min((rungs.count(rung) for rung in set(rungs)), default=1)
    crowded = narrowest / max(len(rungs), 1) < _CROWDED
    for i in range(1, len(rungs) + 1):
        if i == len(rungs) or rungs[i] != rungs[start]:
            turned = {"rotation": 60, "ha": "left"} if crowded else {"ha": "center"}
            axes.text((start + i) / 2, -0.15, rungs[start], va="bottom", fontsize=8, **turned)
            if i < len(rungs):
                axes.axvline(i, color="#24292f", linewidth=1)
            start = i


def ulp_rows(report: Results) -> dict[str, np.ndarray]:
    """Returns by rung how many elements are 0, 1, 2-3, 4-7 ... ULP apart, in the dtype asked for where it was run."""
    rows: dict[str, np.ndarray] = {}
    for rung in report.rungs:
        counts = [m.ulp_counts for f in rung.findings if (m := f.measure or f.float64) and m.ulp_counts]
        if counts:
            total = np.zeros(max(map(len, counts)))
            for count in counts:
                total[: len(count)] += count
            rows[rung.name] = total
    return rows


def draw_ulps(axes: "Axes", rows: dict[str, np.ndarray], dtype: str) -> None:
    """Draws a line a rung: the share of elements by their distance in ULP."""
    from matplotlib import colormaps

    longest = max(map(len, rows.values()))
    for i, (rung, counts) in enumerate(rows.items()):
        colour = colormaps["viridis"](i / max(len(rows) - 1, 1) * 0.9)
        share = 100 * counts / counts.sum()
        axes.step(np.arange(len(share)), share, where="mid", label=rung, color=colour, linewidth=1.4)
    axes.set(yscale="log", xlabel=f"ULP of {dtype} between the sides", ylabel="% of elements")
    ticks = list(range(0, longest, max(1, longest // 8)))
    axes.set_xticks(ticks, [_ulp_text(i) for i in ticks], fontsize=8)
    axes.legend(fontsize=7, ncols=2)
    axes.grid(axis="y", color="#d0d7de", linewidth=0.5)


def _ulp_text(index: int) -> str:
    return "0" if index == 0 else str(2 ** (index - 1)) if index < 12 else f"$2^{{{index - 1}}}$"


def draw_buckets(axes: "Axes", buckets: Sequence[BucketRow], verdicts: dict[str, Verdict]) -> None:
    """Draws buckets to scale, each cut into its tensors, with the colour of the tensor's verdict in the reduction."""
    from matplotlib.patches import Patch

    unit, name = _unit(max(b.bytes for b in buckets))
    for bucket in buckets:
        left = 0.0
        sizes = bucket.sizes or (bucket.bytes // len(bucket.names),) * len(bucket.names)
        for tensor, size in zip(bucket.names, sizes, strict=True):
            colour = COLOURS[verdicts.get(tensor, Verdict.NOT_TESTED)]
            axes.barh(
                bucket.index, size / unit, left=left / unit, color=colour, edgecolor="white", linewidth=0.7, height=0.7
            )
            left += size
        axes.text(bucket.bytes / unit, bucket.index, f"  {_tensors(bucket)}", va="center", fontsize=7)
    shown = [v for v in Verdict if v in {verdicts.get(n, Verdict.NOT_TESTED) for b in buckets for n in b.names}]
    handles = [Patch(color=COLOURS[v], label=LABELS[v].lower()) for v in shown]
    axes.legend(handles=handles, fontsize=7, loc="lower right")
    axes.set(xlabel=name, ylabel="bucket", xlim=(0, 1.3 * max(b.bytes for b in buckets) / unit))
    axes.set_yticks([b.index for b in buckets])
    axes.invert_yaxis()


def _tensors(bucket: BucketRow) -> str:
    return f"{len(bucket.names)} tensor{'s' * (len(bucket.names) > 1)}"


def _unit(size: float) -> tuple[int, str]:
    return (2**20, "MiB") if size >= 2**20 else (2**10, "KiB") if size >= 2**10 else (1, "bytes")


def draw_timeline(axes: "Axes", report: Results) -> None:
    """Draws a lane a side and rank: the backward pass up to each bucket's last gradient, then its all-reduce."""
    lanes = list(dict.fromkeys((t.side, t.rank) for t in report.timeline))
    depth = max(t.bucket for t in report.timeline) + 1
    slowest = max(t.reduced for t in report.timeline)
    unit, name = (1e-3, "ms") if slowest < 1 else (1.0, "s")
    for row, lane in enumerate(lanes):
        own = sorted((t for t in report.timeline if (t.side, t.rank) == lane), key=lambda t: t.ready)
        colour = FIRST if lane[0] == report.sides[0].framework else SECOND
        began = 0.0
        for t in own:
            axes.barh(
                row - 0.25,
                (t.ready - began) / unit,
                left=began / unit,
                height=0.3,
                color=colour,
                alpha=0.35,
                edgecolor="white",
            )
            began = t.ready
            height = 0.45 / depth
            top = row - 0.05 + t.bucket * height
            axes.barh(
                top + height / 2, (t.reduced - t.ready) / unit, left=t.ready / unit, height=0.85 * height, color=colour
            )
            axes.text(t.reduced / unit, top + height / 2, f" {t.bucket}", va="center", fontsize=6)
    axes.set_yticks(range(len(lanes)), [f"{side} {rank}" for side, rank in lanes], fontsize=8)
    axes.set(xlabel=f"{name} since backward began (pale: backward; full: all-reduce of a bucket)")
    axes.invert_yaxis()


def draw_curve(axes: "Axes", curve: Curve, names: tuple[str, str]) -> None:
    """Draws both sides' losses and the band of runs moved by one ULP."""
    from matplotlib.ticker import MaxNLocator

    steps = np.arange(len(curve.first))
    axes.fill_between(steps, curve.low, curve.high, color=FIRST, alpha=0.2, linewidth=0, label="band of one-ULP runs")
    axes.plot(steps, curve.first, color=FIRST, label=names[0], linewidth=1.4)
    axes.plot(
        steps,
        curve.second,
        "--",
        color=SECOND,
        label=names[1],
        linewidth=1.4,
    )
    axes.set(xlabel="step", ylabel="loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize=8)
