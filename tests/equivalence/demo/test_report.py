"""The outcome in words, JSON and pictures."""

import json
import math
import sys

import numpy as np
import pytest

from unified_ddp import BucketPlan, ParamSpec
from unified_ddp.cli import _write
from unified_ddp.equivalence.compare import compare_gradients
from unified_ddp.equivalence.demo import Side, VerifyConfig, VerifyError, VerifyReport
from unified_ddp.equivalence.demo.report import plot_losses, report_to_dict, sparkline
from unified_ddp.equivalence.demo.verdict import CROSS


@pytest.fixture
def report():
    plan = BucketPlan([ParamSpec("w", [2], "float32")], [[0]])
    same = compare_gradients({"w": np.ones(2, np.float32)}, {"w": np.array([1, math.nan], np.float32)}, plan)
    losses = {side: [1.0, 0.5] for side in Side}
    return VerifyReport(VerifyConfig(), plan, {"torch rank 0": 7}, 8, {}, {CROSS: same}, {}, losses, ())


def test_sparkline():
    assert sparkline([0.0, 1.0]) == "▁█"
    assert sparkline([1.0, math.nan, 1.0]) == "▁?▁"
    assert len(sparkline(list(range(500)))) == 48
    assert sparkline([]) == ""


def test_json_is_strict(report):
    data = json.loads(json.dumps(report_to_dict(report), allow_nan=False))
    assert data["plan"]["fingerprints"] == {"torch rank 0": "0000000000000007"}
    assert data["comparisons"][CROSS]["params"][0]["max_abs"] == "inf"
    assert data["losses"] == {"torch": [1.0, 0.5], "jax": [1.0, 0.5]}


def test_a_plot_is_a_png(report, tmp_path):
    plot_losses(report, tmp_path / "losses.png")
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_what_to_install(report, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(VerifyError, match="--plot needs matplotlib; run: pip install matplotlib"):
        plot_losses(report, tmp_path / "losses.png")


def test_files_that_cannot_be_written_are_named(report, tmp_path):
    with pytest.raises(VerifyError, match=r"--plot .*/missing/losses.png: .*No such file"):
        plot_losses(report, tmp_path / "missing" / "losses.png")
    with pytest.raises(VerifyError, match=r"--json .*/missing/report.json: .*No such file"):
        _write(tmp_path / "missing" / "report.json", "{}")
