"""Reports as people see them: a terminal, plain text, one HTML file, a PNG."""

import io
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from equivalence.report_cases import REPORTS, SIDES, TENSORS, make_report
from rich.console import Console

from unified_ddp.equivalence import EquivalenceError, NotEquivalentError, Rung, Verdict
from unified_ddp.equivalence.report.html import report_to_html
from unified_ddp.equivalence.report.labels import LABELS, excess_text, number, shortened
from unified_ddp.equivalence.report.terminal import print_report


def screen(report, width):
    stream = io.StringIO()
    print_report(report, Console(file=stream, width=width))
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 72, 100, 160])
@pytest.mark.parametrize("name", REPORTS)
def test_the_screen_holds_at_any_width(name, width):
    lines = screen(REPORTS[name], width)
    assert max(map(len, lines)) <= width
    report = REPORTS[name]
    for rung in report.rungs:
        (row,) = (line for line in lines if line.split()[:1] == [rung.name] and len(line.split()) > 2)
        assert row.split()[-1] == LABELS[rung.verdict]
        assert row.split()[-2] == excess_text(rung.worst)
    for finding in report.worst() if report.first_failure else ():
        measure = finding.decisive
        wanted = [number(measure.difference), excess_text(finding), LABELS[finding.verdict]]
        assert any(line.split()[-3:] == wanted for line in lines), wanted


@pytest.mark.parametrize("name", [n for n, r in REPORTS.items() if not r.ok])
def test_the_plain_text_is_the_error_and_names_are_whole(name):
    report = REPORTS[name]
    with pytest.raises(NotEquivalentError) as caught:
        report.assert_ok()
    text = str(caught.value)
    assert text == report.explain()
    assert isinstance(caught.value, AssertionError)
    assert all(f.name in text and f.counterparts[0] in text for f in report.worst())
    assert all(item.name in text and item.reason in text for item in report.not_tested)
    assert all(version in text for side in report.sides for version in side.versions.values())
    assert "TF32" in text
    assert "x64" in text


def test_a_report_that_is_ok_returns_itself():
    assert REPORTS["pass"].assert_ok() is REPORTS["pass"]


def test_one_side_beside_its_own_oracle_is_named_once():
    own = tuple(f for f in REPORTS["pass"].findings if f.side == "torch")
    report = replace(REPORTS["pass"], rungs=(Rung("reduced", own),), sides=(SIDES[0], SIDES[0]), until="reduced")
    lines = screen(report, 100)
    assert lines[0] == "PASS  torch: reduced gradients are the mean over ranks"
    assert sum("torch 2.13.0+cpu" in line for line in lines) == report.explain().count("torch 2.13.0+cpu") == 1


def test_worst_names_each_tensor_once_and_only_those_that_fail():
    worst = REPORTS["gradients"].worst()
    assert len({f.name for f in worst}) == len(worst) == 3
    assert worst[0].name == "bn1.weight"
    assert all(f.verdict is Verdict.DIFFERS for f in worst)


class Page(HTMLParser):
    """Checks that elements nest, and collects identifiers, references and text."""

    VOID = ("meta", "br", "wbr")

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.tags, self.text = [], [], [], ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.ids += [value for key, value in attributes if key == "id"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.mark.parametrize(("name", "charts"), [("pass", 5), ("reduced", 4), ("bf16", 2)])
def test_the_html_is_one_file_with_every_chart(name, charts):
    text = report_to_html(REPORTS[name])
    page = Page(text)
    assert page.tags.count("svg") == page.tags.count("figure") == charts
    assert len(page.ids) == len(set(page.ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]*)', text)) <= set(page.ids)
    assert not re.search(r"https?://|<script|<link|@import|src=", text)
    assert all(tensor in page.text for tensor in TENSORS)


def test_the_html_is_the_same_every_time():
    assert report_to_html(REPORTS["reduced"]) == report_to_html(REPORTS["reduced"])


def test_names_are_escaped():
    report = make_report(until="outputs")
    hostile = "<script>alert(1)</script> & [red]x[/red] $x^2$"
    finding = report.rungs[0].findings[0]
    report = replace(report, rungs=(replace(report.rungs[0], findings=(replace(finding, name=hostile),)),))
    assert "<script" not in report_to_html(report)
    assert any("[red]x[/red]" in line for line in screen(report, 120))


def test_without_matplotlib_the_page_has_no_charts_and_a_png_is_refused(tmp_path):
    (tmp_path / "report.json").write_text(REPORTS["reduced"].to_json())
    code = (
        "import sys; from importlib import util\n"
        "real = util.find_spec\n"
        "util.find_spec = lambda name, *a: None if name == 'matplotlib' else real(name, *a)\n"
        "sys.modules['matplotlib'] = None\n"
        "from pathlib import Path; from unified_ddp.equivalence import Report\n"
        "report = Report.from_json(Path('report.json').read_text())\n"
        "report.save('report.html')\n"
        "report.save('report.png')\n"
    )
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert "report.png needs matplotlib" in done.stderr
    page = (tmp_path / "report.html").read_text()
    assert "matplotlib was not installed" in page
    assert "<svg" not in page


@pytest.mark.parametrize("name", ["reduced", "gradients", "bf16"])
def test_the_png_is_written(tmp_path, name):
    path = REPORTS[name].save(tmp_path / "report.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_another_suffix_is_refused(tmp_path):
    with pytest.raises(EquivalenceError, match=r"ends in \.json, \.html or \.png"):
        REPORTS["pass"].save(tmp_path / "report.pdf")


@pytest.mark.parametrize("value", [0.0, 1.0, 0.0123, 99.4, 123.0, 9999.0, 12345.6, 1e-300, 3e38, float("inf")])
def test_numbers_are_short(value):
    text = number(value)
    assert len(text) <= 8
    assert float(text) == pytest.approx(value, rel=0.06)


@pytest.mark.parametrize("width", range(20))
def test_shortened_names_keep_both_ends(width):
    name = "encoder.layers.0.weight"
    text = shortened(name, width)
    assert len(text) <= width
    if width >= 5:
        assert name.startswith(text.split("…")[0])
        assert name.endswith(text.split("…")[1])
