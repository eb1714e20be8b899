"""How the numbers of a failing rung are read."""

from dataclasses import replace

import pytest
from equivalence.report_cases import REPORTS, TENSORS, make_report

from unified_ddp.equivalence import Rung, Verdict
from unified_ddp.equivalence.report.labels import headline
from unified_ddp.equivalence.report.reading import readings


def with_findings(report, change):
    """Returns the report with every differing finding changed."""
    rungs = [
        Rung(r.name, tuple(change(f) if f.verdict is Verdict.DIFFERS else f for f in r.findings)) for r in report.rungs
    ]
    return replace(report, rungs=tuple(rungs))


def test_a_report_that_passes_has_no_reading():
    assert readings(REPORTS["pass"]) == []


@pytest.mark.parametrize(
    ("ratio", "texts"),
    [
        (4.0, ["jax is 4 times the other in every gradient", "a factor on the loss"]),
        (1 / 3, ["0.333333 (1/3) times", "a factor on the loss"]),
        (-1.0, ["the sign is turned"]),
    ],
)
def test_one_ratio_of_all_gradients_is_a_factor_on_the_loss(ratio, texts):
    report = with_findings(REPORTS["scaled"], lambda f: replace(f, ratio=ratio))
    first, *_ = readings(report)
    assert all(text in first for text in texts), first


def test_one_ratio_of_some_gradients_is_a_scale():
    bad = {("gradients", name): (Verdict.DIFFERS, 3e4) for name in list(TENSORS)[:3]}
    report = with_findings(make_report(until="gradients", bad=bad), lambda f: replace(f, ratio=8.0))
    assert readings(report)[0] == "jax is 8 times the other in 3 of 14 tensors: a power of two (2^3)."


def test_a_single_number_is_no_ratio():
    report = make_report(until="loss", bad={("loss", "loss"): (Verdict.DIFFERS, 30.0)})
    assert not [text for text in readings(with_findings(report, lambda f: replace(f, ratio=1.7))) if "times" in text]


@pytest.mark.parametrize(("ratio", "text"), [(2.0, "a sum over ranks for a mean"), (0.5, "divided by the ranks twice")])
def test_a_side_off_its_oracle_is_to_blame_and_the_ranks_are_recognised(ratio, text):
    def change(finding):
        return replace(finding, ratio=ratio) if finding.side == "jax" else replace(finding, verdict=Verdict.PASS)

    report = with_findings(REPORTS["reduced"], change)
    told = readings(report)
    assert "jax differs from the mean of its own ranks' gradients (ranks 0, 1, buckets 1)" in told[0]
    assert text in told[1]
    assert headline(report)[1].startswith("jax: reduced gradients are not the mean over ranks")


def test_sides_that_differ_though_one_is_off_its_oracle_blame_that_one():
    report = REPORTS["reduced"]
    between = tuple(replace(f, side=None, rank=None) for f in report.rungs[-1].findings if f.side == "jax")
    own = tuple(f for f in report.rungs[-1].findings if f.side == "torch")
    report = replace(report, rungs=(*report.rungs[:-1], Rung("reduced", (*own, *between))))
    assert headline(report)[1].startswith("torch: reduced")


def test_precision_names_the_settings():
    (text,) = readings(REPORTS["precision"])
    assert "float64 agrees" in text
    assert "default matmul precision default" in text


def test_a_later_step_and_few_elements_are_told():
    def change(finding):
        if finding.step == 0:
            return replace(finding, verdict=Verdict.PASS)
        return replace(
            finding,
            measure=replace(finding.measure, share_over=0.01),
            float64=replace(finding.float64, share_over=0.01),
        )

    told = readings(with_findings(REPORTS["scaled"], change))
    assert "steps 0 to 0 agree, step 1 is the first that differs." in told
    assert any("only 1 % of the elements" in text for text in told)


def test_notes_are_grouped():
    told = readings(with_findings(REPORTS["scaled"], lambda f: replace(f, note="zero on the second side only")))
    assert told[0].endswith("and 11 more: zero on the second side only.")
