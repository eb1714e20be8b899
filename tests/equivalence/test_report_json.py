"""A report as JSON: the round trip, and the schema that is published."""

import json
import math
from pathlib import Path

import pytest
from equivalence.report_cases import REPORTS

from unified_ddp.equivalence import EquivalenceError, Report
from unified_ddp.equivalence.report.schema import report_schema

PUBLISHED = Path(__file__).parents[2] / "docs" / "equivalence-report.schema.json"


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_survives_json(name):
    report = REPORTS[name]
    again = Report.from_json(report.to_json())
    assert again == report
    assert again.explain() == report.explain()


def test_json_is_strict_and_infinite_values_come_back():
    text = REPORTS["gradients"].to_json()
    json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    assert any(math.isinf(f.measure.excess) for f in Report.from_json(text).findings)


def test_the_published_schema_is_that_of_the_types():
    assert json.loads(PUBLISHED.read_text()) == report_schema()


@pytest.mark.parametrize("name", REPORTS)
def test_reports_are_valid_by_the_schema(name):
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(report_schema())
    jsonschema.validate(json.loads(REPORTS[name].to_json()), report_schema())


def test_every_key_of_the_schema_is_described():
    schema = report_schema()
    for name, definition in {"Report": schema, **schema["$defs"]}.items():
        for key, value in definition.get("properties", {}).items():
            assert value.get("description"), f"{name}.{key}"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda d: d.pop("rungs"), "report.rungs is missing"),
        (lambda d: d.update(ranks="2"), "report.ranks is '2', not int"),
        (lambda d: d.update(ok=None, ranks=True), "report.ranks is 'True', not int"),
        (lambda d: d.update(sides=d["sides"][:1]), "report.sides"),
        (
            lambda d: d["rungs"][0]["findings"][0].update(verdict="fine"),
            "report.rungs[0].findings[0].verdict is 'fine'",
        ),
        (lambda d: d["rungs"][0]["findings"][0]["measure"].update(excess="much"), "measure.excess is 'much'"),
        (lambda d: d.update(format="unified_ddp.equivalence.0"), "'unified_ddp.equivalence.0'"),
    ],
)
def test_what_is_no_report_is_named(change, text):
    data = json.loads(REPORTS["pass"].to_json())
    change(data)
    with pytest.raises(EquivalenceError, match="not a report") as caught:
        Report.from_json(json.dumps(data))
    assert text in str(caught.value)
