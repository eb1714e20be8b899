"""For tests: `assert_equivalent`, and the pytest plugin that writes a report of each comparison.

    def test_port():
        assert_equivalent(TorchSide(model, torch_loss), JaxSide(params, jax_loss), batches, until="gradients")

`pytest --equiv-report DIR` writes DIR/TEST.html and DIR/TEST.json for each call. pytest loads this module when it
starts, so it imports nothing but the standard library itself.
"""

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

    from unified_ddp.equivalence import Report, Side


_NAME_LENGTH = 100


def assert_equivalent(
    first: "Side",
    second: "Side",
    batches: Sequence[Any],
    *,
    until: str = "gradients",
    ranks: int = 2,
    steps: int = 20,
    dtype: str = "float32",
    weights: str = "scrambled",
    power: bool = True,
    **pair: Any,
) -> "Report":
    """Compares two sides and returns the report; under `pytest --equiv-report DIR` it is written there as well.

    Args:
        first: see `unified_ddp.equivalence.Pair`.
        second: see there.
        batches: see there.
        until: see `Pair.check`, as the following.
        ranks: see there.
        steps: see there.
        dtype: see there.
        weights: see there.
        power: see there.
        **pair: further arguments of `Pair`, such as layout, mapping, rules, ignore.

    Raises:
        NotEquivalentError: an AssertionError whose text is the report in words.
        EquivalenceError: the sides cannot be compared.
    """
    from unified_ddp.equivalence import NotEquivalentError, Pair

    __tracebackhide__ = True  # pytest shows the caller's line and the error's text
    report = Pair(first, second, batches, **pair).check(
        until, ranks=ranks, steps=steps, dtype=dtype, weights=weights, power=power
    )
    written = _directories[-1].write(report) if _directories else None
    if not report.ok:
        raise NotEquivalentError(report.explain() + (f"\n\nreport: {written}" if written else ""))
    return report


class _Directory:
    """Where one pytest session writes its reports."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.written: list[tuple[Path, bool]] = []

    def write(self, report: "Report") -> Path:
        """Writes both files and returns the path of the HTML file."""
        self.path.mkdir(parents=True, exist_ok=True)
        stem = _file_name(os.environ.get("PYTEST_CURRENT_TEST", "comparison").rpartition(" (")[0] or "comparison")
        known = {path for path, _ in self.written}
        names = (stem if i == 1 else f"{stem}-{i}" for i in range(1, len(known) + 2))
        page = next(path for path in (self.path / f"{name}.html" for name in names) if path not in known)
        report.save(page.with_suffix(".json"))
        report.save(page)
        self.written.append((page, report.ok))
        return page


_directories: list[_Directory] = []
"""Of the running sessions, the innermost last: a plugin's own tests run sessions inside one."""


def _file_name(test: str) -> str:
    name = re.sub(r"[^\w.\-]+", "_", test).strip("_")
    if len(name) <= _NAME_LENGTH:
        return name
    return f"{name[: _NAME_LENGTH - 9]}-{hashlib.sha256(test.encode()).hexdigest()[:8]}"


def pytest_addoption(parser: "pytest.Parser") -> None:
    """Adds --equiv-report."""
    group = parser.getgroup("unified_ddp")
    group.addoption("--equiv-report", metavar="DIR", help="write HTML and JSON of every assert_equivalent there")


def pytest_configure(config: "pytest.Config") -> None:
    """Opens the directory of reports."""
    wanted = config.getoption("--equiv-report")
    if wanted:
        _directories.append(_Directory(Path(wanted).absolute()))


def pytest_unconfigure(config: "pytest.Config") -> None:
    """Closes it."""
    if config.getoption("--equiv-report"):
        _directories.pop()


def pytest_terminal_summary(terminalreporter: Any, config: "pytest.Config") -> None:
    """Lists what was written; under pytest-xdist the workers write, and the directory is named."""
    if not config.getoption("--equiv-report"):
        return
    directory = _directories[-1]
    terminalreporter.section("equivalence reports")
    for path, ok in directory.written:
        terminalreporter.line(f"{'agrees ' if ok else 'DIFFERS'} {path}")
    if not directory.written:
        terminalreporter.line(f"in {directory.path}")
