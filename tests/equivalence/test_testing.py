"""`assert_equivalent` and the pytest plugin."""

import subprocess
import sys
from pathlib import Path

import pytest

from unified_ddp.equivalence import NotEquivalentError, Report
from unified_ddp.testing import assert_equivalent

SIDES = Path(__file__).parent / "sides"
TESTS = f"""
import sys
sys.path.insert(0, {str(SIDES)!r})
import pytest
from numpy_side import NumpySide, batches
from unified_ddp.testing import assert_equivalent

@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_port(factor):
    assert_equivalent(NumpySide(), NumpySide(factor), batches(), power=False)

def test_twice():
    for _ in range(2):
        assert_equivalent(NumpySide(), NumpySide(), batches(), until="loss", power=False)
"""


@pytest.fixture
def numpy_side(monkeypatch):
    monkeypatch.syspath_prepend(str(SIDES))
    import numpy_side

    return numpy_side


def test_the_report_is_returned_or_raised(numpy_side):
    sides = numpy_side.NumpySide(), numpy_side.NumpySide()
    report = assert_equivalent(*sides, numpy_side.batches(), until="loss", power=False, seed=3)
    assert (report.until, report.seed, report.ok) == ("loss", 3, True)
    with pytest.raises(NotEquivalentError, match="3 times the other at every step"):
        assert_equivalent(numpy_side.NumpySide(), numpy_side.tripled(), numpy_side.batches(), power=False)


def test_pytest_writes_a_report_of_each_comparison(tmp_path):
    (tmp_path / "test_ports.py").write_text(TESTS)
    options = ["-p", "no:cacheprovider", "-q", "--equiv-report", "reports", "test_ports.py"]
    plugin = [] if plugin_is_installed() else ["-p", "unified_ddp.testing"]
    command = [sys.executable, "-P", "-m", "pytest", *plugin, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 1, done.stdout
    assert "1 failed, 2 passed" in done.stdout
    names = {path.name for path in (tmp_path / "reports").iterdir()}
    stems = {"test_port_1.0", "test_port_3.0", "test_twice", "test_twice-2"}
    assert names == {f"test_ports.py_{stem}{suffix}" for stem in stems for suffix in (".html", ".json")}
    page = tmp_path / "reports" / "test_ports.py_test_port_3.0.html"
    assert f"report: {page}" in done.stdout
    assert f"DIFFERS {page}" in done.stdout
    report = Report.from_json(page.with_suffix(".json").read_text())
    assert report.first_failure.name == "loss"
    assert "DIFFERS: the first numpy and the second numpy differ, first at loss" in done.stdout


def plugin_is_installed():
    from importlib.metadata import entry_points

    return any(point.value == "unified_ddp.testing" for point in entry_points(group="pytest11"))


def test_the_plugin_loads_nothing_heavy():
    code = (
        "import sys, unified_ddp.testing\n"
        "assert not {'numpy', 'torch', 'jax', 'rich', 'typer', 'matplotlib', 'pytest'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
