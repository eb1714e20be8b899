"""A report in a file, by its suffix."""

from pathlib import Path

from unified_ddp.equivalence.errors import EquivalenceError
from unified_ddp.equivalence.report.serial import report_to_json
from unified_ddp.equivalence.results import Results

SUFFIXES = (".json", ".html", ".png")


def check_path(path: Path) -> None:
    """Refuses before a comparison what could not be written after it.

    Raises:
        EquivalenceError: the suffix is none of `SUFFIXES`, there is no such folder, or a PNG lacks matplotlib.
    """
    if path.suffix not in SUFFIXES:
        raise EquivalenceError(f"report {path}: give a file that ends in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise EquivalenceError(f"report {path}: the folder {folder} does not exist; create it first")
    if path.suffix == ".png":
        from unified_ddp.equivalence.report.charts import require_matplotlib

        require_matplotlib(f"report {path}")


def save_report(report: Results, path: Path) -> Path:
    """Writes the file and returns its path; see `Report.save`."""
    check_path(path)
    try:
        if path.suffix == ".json":
            path.write_text(report_to_json(report), encoding="utf-8")
        elif path.suffix == ".html":
            from unified_ddp.equivalence.report.html import report_to_html

            path.write_text(report_to_html(report), encoding="utf-8")
        else:
            from unified_ddp.equivalence.report.png import draw_report

            draw_report(report, path)
    except OSError as error:
        raise EquivalenceError(f"report {path}: {error}") from error
    return path
