"""Shows a report: tables on a terminal, JSON, a plot."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from unified_ddp.equivalence.compare import jsonable
from unified_ddp.equivalence.demo.config import Side, VerifyError
from unified_ddp.equivalence.demo.verdict import CROSS, Finding, VerifyReport
from unified_ddp.ranks.texts import ranks_text

_BARS = "▁▂▃▄▅▆▇█"
_ORACLES = tuple(f"{side} vs oracle" for side in Side)


def report_to_dict(report: VerifyReport) -> dict[str, Any]:
    """Returns the report in strict JSON's types. `format` changes whenever a key changes its meaning."""
    buckets = [
        {"index": i, "params": [report.plan.params[p].name for p in b.params], "numel": b.numel, "nbytes": b.nbytes}
        for i, b in enumerate(report.plan.buckets)
    ]
    return jsonable(
        {
            "format": "unified_ddp.equivalence.demo.1",
            "ok": report.ok,
            "findings": [{**asdict(f), "text": describe(f)} for f in report.findings],
            "config": {**asdict(report.config), "tolerance": report.config.k},
            "versions": report.versions,
            "plan": {
                "fingerprint": f"{report.plan.fingerprint:016x}",
                "schema_fingerprint": f"{report.schema_fingerprint:016x}",
                "fingerprints": {name: f"{value:016x}" for name, value in report.fingerprints.items()},
                "buckets": buckets,
            },
            "comparisons": {title: comparison.to_dict() for title, comparison in report.comparisons.items()},
            "buffers": {title: [asdict(row) for row in rows] for title, rows in report.buffers.items()},
            "losses": {str(side): values for side, values in report.losses.items()},
        }
    )


def describe(finding: Finding) -> str:
    """Returns one finding as a sentence."""
    if finding.comparison == "plan":
        return finding.reason
    where = "buffers" if finding.bucket is None else f"bucket {finding.bucket}"
    ranks = ranks_text(finding.ranks)
    text = f"{finding.comparison}: {where} ({', '.join(finding.params)}) differs from step {finding.step} on, {ranks}"
    if finding.comparison == CROSS:
        return (
            f"{text}; each side agrees with its own oracle, so its reduction is right. If from step 0 on, the models "
            "differ; if later, optimizers or buffers do, or rounding has grown: --dtype float64 tells which"
        )
    return f"{text}: {finding.reason}" if finding.reason else text


def print_report(report: VerifyReport, console: Console) -> None:
    """Prints tables of parameters and buckets, loss curves, fingerprints and the verdict."""
    console.print(_param_table(report))
    console.print(_bucket_table(report))
    console.print(_loss_table(report.losses))
    _print_facts(report, console)
    if report.ok:
        k = report.config.k
        text = f"PASS  every reduced gradient of every step and rank is within {k:g} of its tensor's largest value"
        console.print(Panel(text, border_style="green"))
    else:
        lines = [f"FAIL  {escape(describe(finding))}" for finding in report.findings]
        console.print(Panel("\n".join(lines), border_style="red"))


def _param_table(report: VerifyReport) -> Table:
    title = f"Reduced gradients, largest relative difference in any step and rank (tolerance {report.config.k:g})"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("bucket", justify="right")
    table.add_column("parameter", no_wrap=True)
    for head in ("max\n|ref|", "torch-\noracle", "jax-\noracle", "jax-\ntorch", "jax-torch\nabsolute", ""):
        table.add_column(head, justify="right", no_wrap=True)
    wrong = _wrong_params(report)
    oracles = [report.comparisons[title].params for title in _ORACLES]
    for t, j, cross in zip(*oracles, report.comparisons[CROSS].params, strict=True):
        bad = cross.name in wrong
        numbers = (t.max_rel, j.max_rel, cross.max_rel, cross.max_abs)
        cells = (str(cross.bucket), cross.name, f"{cross.scale:.2g}", *(f"{n:.1e}" for n in numbers))
        table.add_row(*cells, _status(bad, cross.ok), style="red" if bad else None)
    return table


def _bucket_table(report: VerifyReport) -> Table:
    table = Table(
        title="The same by bucket (ULP: steps between the reduction and its oracle)",
        title_justify="left",
        box=box.SIMPLE,
    )
    heads = (
        "bucket",
        "params",
        "bytes",
        "torch\nULP",
        "jax\nULP",
        "jax-\ntorch",
        "jax-torch\nabsolute",
        "",
    )
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    wrong = {finding.bucket for finding in report.findings}
    oracles = [report.comparisons[title].buckets for title in _ORACLES]
    for t, j, cross in zip(*oracles, report.comparisons[CROSS].buckets, strict=True):
        spec, bad = report.plan.buckets[cross.index], cross.index in wrong
        cells = (cross.index, len(spec.params), spec.nbytes, f"{t.max_ulp:.3g}", f"{j.max_ulp:.3g}")
        differences = (f"{cross.max_rel:.1e}", f"{cross.max_abs:.1e}")
        table.add_row(*map(str, cells), *differences, _status(bad, cross.ok), style="red" if bad else None)
    return table


def _loss_table(losses: dict[Side, list[float]]) -> Table:
    table = Table(title="Loss, mean over ranks", title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for title in ("side", "curve", "first", "last"):
        table.add_column(title)
    for side, values in losses.items():
        table.add_row(side, sparkline(values), f"{values[0]:.6f}", f"{values[-1]:.6f}")
    return table


def _print_facts(report: VerifyReport, console: Console) -> None:
    gap = max(abs(a - b) for a, b in zip(*report.losses.values(), strict=True))
    buffers = max((row.max_rel for row in report.buffers[CROSS]), default=0.0)
    console.print(f"largest loss difference {gap:.1e}; batch-norm buffers, jax-torch relative {buffers:.1e}")
    ranks = report.config.world_size
    if len(set(report.fingerprints.values())) == 1:
        console.print(
            f"plan {report.plan.fingerprint:016x}, the same on {ranks} torch and {ranks} jax ranks", highlight=False
        )
    console.print(", ".join(f"{name} {number}" for name, number in report.versions.items()), highlight=False)


def _status(wrong: bool, cross_ok: bool) -> str:
    """Once one reduction is broken the two sides walk apart: the others are right, but differ between the sides."""
    return "FAIL" if wrong else "ok" if cross_ok else "apart"


def _wrong_params(report: VerifyReport) -> set[str]:
    return {name for finding in report.findings for name in finding.params}


def sparkline(values: Sequence[float], width: int = 48) -> str:
    """Returns a curve of at most `width` characters, lowest value to highest; "?" stands for NaN or infinity."""
    count = min(width, len(values))
    chosen = [values[round(i * (len(values) - 1) / max(count - 1, 1))] for i in range(count)]
    finite = [v for v in chosen if math.isfinite(v)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    step = (high - low) / (len(_BARS) - 1) or 1.0
    return "".join(_BARS[round((v - low) / step)] if math.isfinite(v) else "?" for v in chosen)


def plot_losses(report: VerifyReport, path: Path) -> None:
    """Writes loss curves and jax-torch differences as a PNG.

    Raises:
        VerifyError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise VerifyError("--plot needs matplotlib; run: pip install matplotlib") from error
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for side, style in ((Side.TORCH, "-"), (Side.JAX, "--")):
        left.plot(report.losses[side], style, label=side)
    left.set(title="Loss, mean over ranks", xlabel="step")
    left.legend()
    rows = report.comparisons[CROSS].params
    right.barh([r.name for r in rows], [r.max_rel if math.isfinite(r.max_rel) else 1.0 for r in rows])
    right.axvline(report.config.k, color="red", label="tolerance")
    right.set(title="jax-torch, relative to the largest value", xscale="log")
    right.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise VerifyError(f"--plot {path}: {error}") from error
