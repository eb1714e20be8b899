import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unified_ddp import ParamSpec, plan_in_ready_order, schema_fingerprint

FIELDS = {"name": "layer.weight", "shape": [3, 4], "dtype": "float32", "trainable": True}
CHANGES = [{"name": "layer.weighs"}, {"shape": [4, 3]}, {"shape": [12]}, {"dtype": "int32"}, {"trainable": False}]
REST = [ParamSpec("bias", [3], "float32"), ParamSpec("scale", [], "bfloat16")]


def schema_of(**changes: object) -> int:
    return schema_fingerprint([ParamSpec(**{**FIELDS, **changes}), *REST])  # type: ignore[arg-type]


def plan_of(**changes: object) -> int:
    return plan_in_ready_order([ParamSpec(**{**FIELDS, **changes}), *REST], [100]).fingerprint  # type: ignore[arg-type]


def test_golden_values() -> None:
    # Ranks of different versions and platforms compare these numbers. Change the format's name if they must change.
    assert schema_fingerprint([]) == 0x49e82597bbb74ff7
    assert schema_of() == 0xb74f484665817f19
    assert plan_in_ready_order([], [1]).fingerprint == 0x5709c32c7c2252e5
    assert plan_of() == 0xff0ff3c1ae9eebd0


@pytest.mark.parametrize("fingerprint", [schema_of, plan_of])
def test_every_shared_field_counts(fingerprint) -> None:  # type: ignore[no-untyped-def]
    values = [fingerprint(), *(fingerprint(**change) for change in CHANGES)]
    assert len(set(values)) == len(values)
    assert all(0 <= value < 2**64 for value in values)


@pytest.mark.parametrize("fingerprint", [schema_of, plan_of])
def test_what_one_framework_alone_knows_does_not(fingerprint) -> None:  # type: ignore[no-untyped-def]
    assert fingerprint(strides=[1, 3]) == fingerprint()


def test_device_and_sparsity_do_not_change_the_schema() -> None:
    assert schema_of(device="cuda:0", sparse=True) == schema_of()


@given(st.permutations(range(8)))
def test_schema_is_independent_of_order(order: list[int]) -> None:
    params = [ParamSpec(f"p{i}", [i], "float32") for i in range(8)]
    assert schema_fingerprint([params[i] for i in order]) == schema_fingerprint(params)


def test_plan_depends_on_order_and_cuts() -> None:
    params = [ParamSpec(f"p{i}", [1], "float32") for i in range(3)]
    plans = {
        (plan.fingerprint, tuple(b.params for b in plan.buckets))
        for order in itertools.permutations(range(3))
        for cap in (4, 8, 12)
        for plan in [plan_in_ready_order(params, [cap], order)]
    }
    assert len({fingerprint for fingerprint, _ in plans}) == len({buckets for _, buckets in plans}) == 18


def test_names_and_shapes_do_not_run_into_each_other() -> None:
    assert schema_fingerprint([ParamSpec("ab", [], "bool"), ParamSpec("c", [], "bool")]) != schema_fingerprint(
        [ParamSpec("a", [], "bool"), ParamSpec("bc", [], "bool")]
    )
