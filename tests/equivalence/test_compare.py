"""Comparison of two gradient sets: differences, ULP, verdicts, and what is refused."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from unified_ddp import BucketPlan, ParamSpec
from unified_ddp.equivalence.compare import (
    ComparisonError,
    compare_arrays,
    compare_gradients,
    merge_comparisons,
    ulp_distance,
)

NAMES = ("conv.weight", "fc.weight", "fc.bias")


def make_plan(dtype="float32"):
    params = [ParamSpec(name, [2, 3], dtype) for name in NAMES]
    return BucketPlan(params, [[2, 1], [0]])


def grads(dtype="float32"):
    return {name: (np.arange(6).reshape(2, 3) + i + 1).astype(dtype) for i, name in enumerate(NAMES)}


def test_equal_sets_pass_in_the_plans_order():
    result = compare_gradients(grads(), grads(), make_plan())
    assert result.ok
    assert result.first_offender is None
    assert [p.name for p in result.params] == ["fc.bias", "fc.weight", "conv.weight"]
    assert [p.bucket for p in result.params] == [0, 0, 1]
    assert all(p.max_abs == p.max_rel == p.max_ulp == 0 for p in result.params)


def test_a_difference_is_measured_and_located():
    actual = grads()
    actual["fc.weight"][1, 2] += 0.7
    result = compare_gradients(grads(), actual, make_plan())
    assert not result.ok
    assert result.offenders == ("fc.weight",)
    row = result.params[1]
    assert row.max_abs == pytest.approx(0.7, rel=1e-6)
    assert row.max_rel == pytest.approx(0.1, rel=1e-6)
    assert [b.ok for b in result.buckets] == [False, True]
    assert result.buckets[0].params == ("fc.bias", "fc.weight")
    assert result.buckets[0].max_abs == row.max_abs


@pytest.mark.parametrize(("dtype", "inside", "outside"), [("float32", 0.9e-5, 1.2e-5), ("float64", 0.9e-13, 1.2e-13)])
def test_default_tolerances(dtype, inside, outside):
    reference = np.array([1.0, -0.25], dtype)
    for gap, ok in ((inside, True), (outside, False)):
        assert compare_arrays(reference, reference + np.array([0, gap], dtype), "w").ok is ok


def test_the_bound_follows_the_tensor_not_the_element():
    reference = np.array([1000.0, 1e-6], np.float32)
    assert compare_arrays(reference, reference + np.array([0, 1e-3], np.float32), "w").ok


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["reference", "actual"])
def test_non_finite_on_one_side_never_passes(bad, side):
    reference, actual = np.ones(3, np.float32), np.ones(3, np.float32)
    {"reference": reference, "actual": actual}[side][1] = bad
    row = compare_arrays(reference, actual, "w", tolerance=1e30)
    assert not row.ok
    assert row.max_abs == row.max_rel == row.max_ulp == math.inf
    assert row.non_finite == 1


def test_non_finite_on_both_sides_is_equal_but_counted():
    values = np.array([math.nan, math.inf, -math.inf, 1], np.float32)
    row = compare_arrays(values, values.copy(), "w")
    assert row.ok
    assert row.non_finite == 3
    assert row.scale == 1
    assert not compare_arrays(values, -values, "w").ok


def test_a_zero_reference_allows_only_what_may_be_flushed():
    zero = np.zeros(3, np.float32)
    assert compare_arrays(zero, -zero, "w").ok
    flushed = compare_arrays(zero, np.full(3, 1e-40, np.float32), "w")
    assert flushed.ok
    assert flushed.max_rel == math.inf
    assert not compare_arrays(zero, np.full(3, 1e-37, np.float32), "w").ok


def test_a_wider_reference_is_compared_without_rounding_it():
    reference = np.array([1 + 2**-30])
    row = compare_arrays(reference, np.ones(1, np.float32), "w")
    assert row.max_abs == 2**-30
    assert row.max_ulp == 0


def test_complex_and_integers_and_empty():
    z = np.array([1 + 2j], np.complex64)
    assert compare_arrays(z, z + np.complex64(0.5j), "w").max_abs == 0.5
    assert compare_arrays(np.array([3]), np.array([3]), "n").ok
    assert not compare_arrays(np.array([10**9]), np.array([10**9 + 1]), "n").ok
    assert compare_arrays(np.zeros((0, 2), np.float32), np.zeros((0, 2), np.float32), "e").ok


def test_names_are_checked():
    lacking = {k: v for k, v in grads().items() if k != "fc.bias"}
    with pytest.raises(ComparisonError, match=r"actual set of gradients lacks \['fc.bias'\]"):
        compare_gradients(grads(), lacking, make_plan())
    with pytest.raises(ComparisonError, match=r"reference set of gradients has \['more'\]"):
        compare_gradients({**grads(), "more": np.ones(1)}, grads(), make_plan())


def test_shapes_and_dtypes_are_checked():
    with pytest.raises(ComparisonError, match=r"'fc.bias' has shape \(1,\) in the actual set"):
        compare_gradients(grads(), {**grads(), "fc.bias": np.ones(1, np.float32)}, make_plan())
    with pytest.raises(ComparisonError, match=r"'fc.bias' has dtype float64 in the actual set"):
        compare_gradients(grads(), grads("float64"), make_plan())
    compare_gradients(grads("float64"), grads(), make_plan())
    with pytest.raises(ComparisonError, match=r"has shape \(2,\) in the reference"):
        compare_arrays(np.ones(2), np.ones(3), "w")
    with pytest.raises(ComparisonError, match="'w' has dtype object, which is not compared; cast it to float32"):
        compare_arrays(np.ones(2), np.array([1, 2], object), "w")


def test_frozen_parameters_have_no_gradient():
    params = [ParamSpec("w", [1], "float32"), ParamSpec("frozen", [1], "float32", trainable=False)]
    one = {"w": np.ones(1, np.float32)}
    assert [p.name for p in compare_gradients(one, one, BucketPlan(params, [[0, 1]])).params] == ["w"]


def test_merging_keeps_the_largest_of_each():
    actual = grads()
    actual["fc.bias"][0, 0] += 1
    plan = make_plan()
    merged = merge_comparisons([compare_gradients(grads(), grads(), plan), compare_gradients(grads(), actual, plan)])
    assert merged.offenders == ("fc.bias",)
    assert merged.params[0].max_abs == 1
    with pytest.raises(ComparisonError, match="there is no comparison to merge; give at least one"):
        merge_comparisons([])
    fewer = {"fc.bias": grads()["fc.bias"]}
    one = compare_gradients(fewer, fewer, BucketPlan([ParamSpec("fc.bias", [2, 3], "float32")], [[0]]))
    with pytest.raises(ComparisonError, match="comparisons of different parameters cannot be merged"):
        merge_comparisons([merged, one])


def test_json_is_strict():
    actual = grads()
    actual["fc.bias"][0, 0] = math.nan
    text = json.dumps(compare_gradients(grads(), actual, make_plan()).to_dict(), allow_nan=False)
    assert json.loads(text)["params"][0]["max_abs"] == "inf"
    assert json.loads(text)["first_offender"] == "fc.bias"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_ulp_counts_steps_through_zero(dtype):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    kind = np.dtype(dtype)
    unsigned = np.dtype(f"u{kind.itemsize}")
    smallest = np.array([1], unsigned).view(kind)
    assert ulp_distance(smallest, -smallest)[0] == 2
    assert ulp_distance(np.zeros(1, kind), -np.zeros(1, kind))[0] == 0
    one = np.ones(1, kind)
    following = (one.view(unsigned) + np.array(3, unsigned)).view(kind)
    assert ulp_distance(one, following)[0] == 3
    assert ulp_distance(-one, -following)[0] == 3


def test_ulp_refuses_other_dtypes():
    with pytest.raises(ComparisonError, match="no ULP distance between int32 and int32; cast both"):
        ulp_distance(np.ones(1, np.int32), np.ones(1, np.int32))


finite32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
arrays32 = hnp.arrays(np.float32, hnp.array_shapes(max_dims=2, max_side=4), elements=st.floats(width=32))


@given(finite32, finite32, finite32)
def test_ulp_is_a_metric(a, b, c):
    def distance(x, y):
        return ulp_distance(np.float32([x]), np.float32([y]))[0]

    assert distance(a, b) == distance(b, a)
    assert (distance(a, b) == 0) == (a == b)
    assert distance(a, c) <= distance(a, b) + distance(b, c)


@given(finite32, st.integers(0, 50))
def test_ulp_agrees_with_nextafter(start, steps):
    value = np.float32(start)
    with np.errstate(over="ignore"):
        for _ in range(steps):
            value = np.nextafter(value, np.float32(np.inf))
    if np.isfinite(value):
        assert ulp_distance(np.float32([start]), np.array([value]))[0] == steps


@pytest.mark.filterwarnings("error")
@given(arrays32)
def test_any_array_equals_itself_and_nothing_warns(values):
    row = compare_arrays(values, values.copy(), "w")
    assert row.ok
    assert row.max_abs == row.max_ulp == 0


@given(arrays32, st.data())
def test_an_element_outside_the_bound_never_passes(values, data):
    """The verdict agrees with a plain loop over elements."""
    other = data.draw(hnp.arrays(np.float32, values.shape, elements=st.floats(width=32)))
    row = compare_arrays(values, other, "w")
    scale = max([abs(float(v)) for v in values.flat if math.isfinite(v)], default=0.0)
    bound = max(1e-5 * scale, 2.0**-126)

    def inside(x, y):
        return x == y or (math.isnan(x) and math.isnan(y)) or abs(x - y) <= bound

    assert row.ok == all(inside(float(x), float(y)) for x, y in zip(values.flat, other.flat, strict=True))
