"""The command itself, on real processes of both frameworks."""

import pytest
from equivalence.verify_cli import QUICK_COMPILE, run_verify

CROSS = "jax vs torch"
ORACLES = ("torch vs oracle", "jax vs oracle")
NAMES = {
    "conv1.weight",
    "bn1.weight",
    "bn1.bias",
    "conv2.weight",
    "bn2.weight",
    "bn2.bias",
    "fc1.weight",
    "fc1.bias",
    "fc2.weight",
    "fc2.bias",
}


def worst(report, title):
    return max(row["max_rel"] for row in report["comparisons"][title]["params"])


@pytest.mark.timeout(300)
def test_float32_passes_and_reports_everything(tmp_path):
    outcome = run_verify(tmp_path, "--steps", "8", "--plot", str(tmp_path / "losses.png"))
    assert outcome.status == 0, outcome.out + outcome.error
    assert "PASS" in outcome.out
    report = outcome.report
    assert report["format"] == "unified_ddp.equivalence.demo.1"
    assert report["ok"]
    assert report["findings"] == []
    assert worst(report, CROSS) <= 1e-5
    assert max(worst(report, title) for title in ORACLES) <= 1e-6
    assert set(report["comparisons"]) == set(report["buffers"]) == {CROSS, *ORACLES}
    for comparison in report["comparisons"].values():
        assert {row["name"] for row in comparison["params"]} == NAMES
        assert all(row["scale"] > 0 for row in comparison["params"])
    assert_plan_is_shared(report, ranks=2)
    assert_it_trains(report, steps=8)
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


def assert_plan_is_shared(report, ranks):
    plan = report["plan"]
    assert set(plan["fingerprints"]) == {f"{side} rank {rank}" for side in ("torch", "jax") for rank in range(ranks)}
    assert set(plan["fingerprints"].values()) == {plan["fingerprint"]}
    assert len(plan["buckets"]) > 1
    assert sorted(name for bucket in plan["buckets"] for name in bucket["params"]) == sorted(NAMES)


def assert_it_trains(report, steps):
    for losses in report["losses"].values():
        assert len(losses) == steps
        assert losses[-1] < losses[0]


@pytest.mark.timeout(300)
def test_float64_agrees_to_1e_12_on_three_ranks(tmp_path):
    options = ("--dtype", "float64", "--steps", "5", "--world-size", "3", "--batch-size", "8")
    outcome = run_verify(tmp_path, *options)
    assert outcome.status == 0, outcome.out + outcome.error
    assert max(worst(outcome.report, title) for title in (CROSS, *ORACLES)) <= 1e-12
    assert all(row["tolerance"] == 1e-13 for row in outcome.report["comparisons"][CROSS]["params"])
    buffers = [row for rows in outcome.report["buffers"].values() for row in rows]
    assert len(buffers) == 3 * 6
    assert max(row["max_rel"] for row in buffers) <= 1e-12
    assert_plan_is_shared(outcome.report, ranks=3)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("side", "fault", "bucket", "step", "reason"),
    [
        ("torch", "skip-bucket", 0, 0, "not reduced"),
        ("torch", "sum", 2, 0, "2 times the mean"),
        ("torch", "stale-rank", 1, 1, "rank 1 contributed its gradients of the step before"),
        ("jax", "skip-bucket", 3, 0, "not reduced"),
        ("jax", "sum", 1, 0, "2 times the mean"),
        ("jax", "stale-rank", 2, 1, "rank 0 contributed its gradients of the step before"),
    ],
)
def test_a_fault_is_caught_and_located(tmp_path, side, fault, bucket, step, reason):
    options = ("--steps", "3", "--inject", fault, "--inject-into", side, "--inject-bucket", str(bucket))
    rank = ("--inject-rank", "0") if "rank 0" in reason else ()
    outcome = run_verify(tmp_path, *options, *rank, environment=QUICK_COMPILE)
    assert outcome.status == 1, outcome.out + outcome.error
    assert not outcome.report["ok"]
    (finding,) = outcome.report["findings"]
    assert finding["comparison"] == f"{side} vs oracle"
    assert finding["bucket"] == bucket
    assert finding["params"] == outcome.report["plan"]["buckets"][bucket]["params"]
    assert finding["step"] == step
    assert finding["ranks"] == [0, 1]
    assert reason in finding["reason"]
    assert "FAIL" in outcome.out
    assert all(name in outcome.out for name in finding["params"])
