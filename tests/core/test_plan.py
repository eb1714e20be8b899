import copy
import json
import pickle
import sys

import numpy as np
import pytest

from unified_ddp import (
    BucketPlan,
    ParamSpec,
    PlanError,
    bucket_caps,
    plan_from_json,
    plan_in_ready_order,
    plan_to_json,
)
from unified_ddp.plan import MIB, plan_buckets


def small_model() -> list[ParamSpec]:
    return [
        ParamSpec("embed.weight", [50, 8], "float32", sparse=True),
        ParamSpec("conv.weight", [4, 3, 3, 3], "float32", strides=[27, 1, 9, 3], device="cuda:0"),
        ParamSpec("conv.bias", [4], "float32", device="cuda:0"),
        ParamSpec("head.weight", [10, 4], "bfloat16"),
        ParamSpec("head.scale", [], "float64", trainable=False),
    ]


def test_ready_order_is_the_reverse_of_registration() -> None:
    params = [ParamSpec(name, [100], "float32") for name in "abcd"]
    assert [b.params for b in plan_in_ready_order(params, [800]).buckets] == [(3, 2), (1, 0)]
    assert [b.params for b in plan_in_ready_order(params, [400, 800], [1, 3, 0, 2]).buckets] == [(1,), (3, 0), (2,)]


def test_places_in_storage() -> None:
    plan = plan_in_ready_order([ParamSpec("a", [2, 3], "float16"), ParamSpec("b", [0], "float16")], [MIB])
    (bucket,) = plan.buckets
    assert (bucket.params, bucket.offsets, bucket.numel, bucket.nbytes, bucket.cap) == ((1, 0), (0, 0), 6, 12, MIB)
    assert (bucket.dtype, bucket.device, bucket.sparse) == ("float16", "cpu", False)


def test_no_parameters_make_no_buckets() -> None:
    plan = plan_in_ready_order([], bucket_caps())
    assert plan.buckets == ()
    assert plan_from_json(plan_to_json(plan)) == plan


def test_bucket_caps() -> None:
    assert bucket_caps() == [MIB, 25 * MIB]
    assert bucket_caps(2.5) == [int(2.5 * MIB)]
    assert bucket_caps(7, [1, 0.5]) == [MIB, MIB // 2]
    assert bucket_caps(1e-9) == [1]
    assert bucket_caps(1e308) == bucket_caps(10**400) == [sys.maxsize]
    assert bucket_caps(np.float32(2)) == bucket_caps(None, np.array([2])) == [2 * MIB]


@pytest.mark.parametrize("cap", [0, -1, float("inf"), float("nan")])
def test_bucket_caps_refuses_values(cap: float) -> None:
    with pytest.raises(ValueError, match="bucket_cap_mb takes positive, finite"):
        bucket_caps(cap)
    with pytest.raises(ValueError, match="bucket_cap_mb_list takes positive, finite"):
        bucket_caps(None, [1, cap])


def test_bucket_caps_refuses_types() -> None:
    with pytest.raises(TypeError, match="'25' of type str"):
        bucket_caps("25")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="True of type bool"):
        bucket_caps(True)
    for caps in ("25", 25):
        with pytest.raises(TypeError, match=f"bucket_cap_mb_list is a sequence of numbers of MiB, not {caps!r}"):
            bucket_caps(None, caps)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bucket_cap_mb_list is empty"):
        bucket_caps(25, [])


def test_json_round_trip() -> None:
    plan = plan_in_ready_order(small_model(), [100, 1000])
    again = plan_from_json(plan_to_json(plan))
    assert again == plan
    assert again.fingerprint == plan.fingerprint
    assert [p.strides for p in again.params] == [p.strides for p in plan.params]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format="other"), "the plan has format 'other'; this version reads 'unified_ddp.plan.1'"),
        (lambda d: d.update(fingerprint="0" * 16), "was changed after it was written"),
        (lambda d: d.update(fingerprint="no number"), "not a bucket plan"),
        (lambda d: d["params"][2].update(shape=[5]), "was changed after it was written"),
        (lambda d: d["params"][2].update(shape="x"), "not a bucket plan"),
        (lambda d: d["buckets"][0]["params"].append("nobody"), "not a bucket plan"),
        (lambda d: d["buckets"].pop(), "stands in no bucket"),
        (lambda d: d.pop("params"), "not a bucket plan"),
    ],
)
def test_json_that_is_no_plan(change, message: str) -> None:  # type: ignore[no-untyped-def]
    data = json.loads(plan_to_json(plan_in_ready_order(small_model(), [100, 1000])))
    change(data)
    with pytest.raises(PlanError, match=message):
        plan_from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "[]", "null", "{", '{"format": 3}'])
def test_text_that_is_no_plan(text: str) -> None:
    with pytest.raises(PlanError):
        plan_from_json(text)


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_clones_are_equal(clone) -> None:  # type: ignore[no-untyped-def]
    plan = plan_in_ready_order(small_model(), [100, 1000])
    for original in (*plan.params, plan):
        assert clone(original) == original
        assert hash(clone(original)) == hash(original)
    assert clone(plan).buckets[0].cap == plan.buckets[0].cap


def test_equality() -> None:
    model = small_model()
    assert len({*model, *small_model()}) == len(model)
    assert ParamSpec("a", [2], "float32") != ParamSpec("a", [2], "float32", device="cuda:0")
    assert plan_in_ready_order(model, [100]) != plan_in_ready_order(model, [100], range(len(model)))
    assert plan_in_ready_order(model, [100]) != plan_in_ready_order(model, [10**6])
    assert plan_in_ready_order(model, [100]) != "a plan"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ParamSpec("layer.w", [1], "float33"), "'layer.w' has the unknown dtype 'float33'"),
        (lambda: ParamSpec("layer.w", [2, -1], "float32"), "'layer.w' has the negative extent -1"),
        (lambda: ParamSpec("layer.w", [2**40, 2**40], "float32"), r"'layer.w' is larger than 2\^63"),
        (lambda: ParamSpec("layer.w", [2**40, 0, 2**40], "float32"), r"'layer.w' is larger than 2\^63"),
        (lambda: ParamSpec("layer.w", [2], "float32", strides=[1, 2]), "'layer.w' has 1 dimensions but 2 strides"),
    ],
)
def test_errors_name_the_parameter(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(PlanError, match=message):
        make()


A = ParamSpec("a", [2], "float32")
B = ParamSpec("b", [2], "float32")


@pytest.mark.parametrize(
    ("params", "buckets", "message"),
    [
        ([A, A], [[0, 1]], "two parameters are named 'a'"),
        ([A, B], [[0]], "'b' stands in no bucket"),
        ([A, B], [[0, 1], [1]], "'b' stands in two places"),
        ([A, B], [[0, 1], []], "a bucket is empty"),
        ([A, B], [[0, 1, 2]], "parameter number 2 of 2"),
        ([A, ParamSpec("c", [2], "float64")], [[0, 1]], "'a' and 'c' differ in dtype or device"),
        ([A, ParamSpec("c", [2], "float32", device="cuda:0")], [[0, 1]], "'a' and 'c' differ in dtype or device"),
        ([A, ParamSpec("c", [2], "float32", sparse=True)], [[0, 1]], "sparse parameter 'c' shares a bucket"),
        ([ParamSpec(n, [2**60], "float32") for n in "xy"], [[0, 1]], r"'y' is larger than 2\^63"),
    ],
)
def test_plan_errors_name_parameters(params: list[ParamSpec], buckets: list[list[int]], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        BucketPlan(params, buckets)


@pytest.mark.parametrize(
    ("caps", "order", "message"),
    [
        ([], None, "no bucket cap"),
        ([-1], None, "bucket cap -1 is negative"),
        ([1], [0], "lacks parameter 'b'"),
        ([1], [0, 0], "not a permutation"),
        ([1], [0, 2], "not a permutation"),
    ],
)
def test_planner_errors(caps: list[int], order: list[int] | None, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_buckets([A, B], caps, order=order)


def test_caps_of_another_length() -> None:
    with pytest.raises(PlanError, match="1 buckets was given 2 caps"):
        BucketPlan([A], [[0]], caps=[1, 2])


def test_sizes_near_the_limit_do_not_overflow() -> None:
    params = [ParamSpec(name, [2**60], "float32") for name in "abc"]
    assert len(plan_buckets(params, [2**62]).buckets) == 3
    with pytest.raises(PlanError, match=r"'b' is larger than 2\^63 bytes; give a smaller cap"):
        plan_buckets(params, [2**63 - 1])
