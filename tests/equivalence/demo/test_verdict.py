"""The verdict on made-up steps: what is found, what is named, and what is never green."""

import math

import numpy as np

from unified_ddp import BucketPlan, ParamSpec
from unified_ddp.equivalence.demo import Side, VerifyConfig
from unified_ddp.equivalence.demo.exchange import StepRecord
from unified_ddp.equivalence.demo.report import describe
from unified_ddp.equivalence.demo.verdict import Judge, oracle

NAMES = ("a", "b", "c")
PLAN = BucketPlan([ParamSpec(name, [4], "float32") for name in NAMES], [[2], [1, 0]])
BUFFERS = {"bn.running_mean": np.ones(2, np.float32)}


def local(step, rank):
    rng = np.random.default_rng([step, rank])
    return {name: rng.standard_normal(4).astype(np.float32) for name in NAMES}


def mean(step, size=2):
    return {name: np.mean([local(step, r)[name] for r in range(size)], axis=0) for name in NAMES}


def record(step, rank, reduced, buffers=BUFFERS):
    return StepRecord(loss=1.0, reduced=reduced, local=local(step, rank), buffers=buffers, plain_buffers=BUFFERS)


def right(step):
    return [record(step, rank, mean(step)) for rank in range(2)]


def judged(*steps):
    judge = Judge(VerifyConfig(), PLAN)
    for step, records in enumerate(steps):
        judge.add(step, records)
    return judge.result()


def test_right_steps_are_green():
    assert judged(*({Side.TORCH: right(s), Side.JAX: right(s)} for s in range(3))) == ()


def test_the_first_wrong_step_is_found_on_the_right_rank_only():
    wrong = {**mean(1), "b": mean(1)["b"] + np.float32(0.1)}
    broken = [record(1, 0, mean(1)), record(1, 1, wrong)]
    first = {Side.TORCH: right(0), Side.JAX: right(0)}
    findings = judged(first, {Side.TORCH: right(1), Side.JAX: broken})
    assert [(f.comparison, f.bucket, f.params, f.step, f.ranks) for f in findings] == [
        ("jax vs oracle", 1, ("b",), 1, (1,))
    ]
    assert "none of the known faults" in findings[0].reason


def test_equal_but_wrong_is_caught_on_both_sides():
    doubled = {name: 2 * value for name, value in mean(0).items()}
    wrong = [record(0, rank, doubled) for rank in range(2)]
    findings = judged({Side.TORCH: wrong, Side.JAX: wrong})
    assert {f.comparison for f in findings} == {"torch vs oracle", "jax vs oracle"}
    assert {name for f in findings for name in f.params} == set(NAMES)
    assert all("2 times the mean" in f.reason for f in findings)


def test_sides_that_differ_but_reduce_rightly_point_at_the_models():
    other = [StepRecord(1.0, mean(7), local(7, rank), BUFFERS, BUFFERS) for rank in range(2)]
    findings = judged({Side.TORCH: right(0), Side.JAX: other})
    assert {f.comparison for f in findings} == {"jax vs torch"}
    assert "its reduction is right" in describe(findings[0])


def test_nan_on_all_sides_is_never_green():
    def poisoned(rank):
        gradients = {name: np.full(4, math.nan, np.float32) for name in NAMES}
        return StepRecord(1.0, gradients, gradients, BUFFERS, BUFFERS)

    both = [poisoned(0), poisoned(1)]
    findings = judged({Side.TORCH: both, Side.JAX: both})
    assert {name for f in findings for name in f.params} == set(NAMES)
    assert "NaN or infinite" in findings[0].reason


def test_a_wrong_buffer_is_found():
    wrong = [record(0, rank, mean(0), {"bn.running_mean": np.zeros(2, np.float32)}) for rank in range(2)]
    findings = judged({Side.TORCH: right(0), Side.JAX: wrong})
    assert [(f.comparison, f.bucket, f.params) for f in findings] == [("jax vs oracle", None, ("bn.running_mean",))]
    assert "buffers (bn.running_mean)" in describe(findings[0])


def test_the_oracle_is_the_mean_in_double_precision():
    values = oracle(right(0))
    assert all(array.dtype == np.float64 for array in values.values())
    expected = (local(0, 0)["a"].astype(np.float64) + local(0, 1)["a"].astype(np.float64)) / 2
    np.testing.assert_array_equal(values["a"], expected)
