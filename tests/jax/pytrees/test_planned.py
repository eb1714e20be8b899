"""Parameters of a plan in pytrees: plans taken over from elsewhere, and that planning happens once."""

from typing import Any

import jax.numpy as jnp
import pytest
from jax_cases import Replicas, assert_all_close, loss_fn, make_batch, make_params, oracle

from unified_ddp.errors import PlanError
from unified_ddp.jax import DistributedDataParallel, param_specs
from unified_ddp.jax.pytrees import planned as schema_module
from unified_ddp.plan import BucketPlan, ParamSpec, plan_from_json, plan_in_ready_order, plan_to_json

pytestmark = pytest.mark.timeout(120)


def test_planned_once_however_often_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []
    plan = schema_module.plan_in_ready_order
    monkeypatch.setattr(schema_module, "plan_in_ready_order", lambda *args: planned.append(args) or plan(*args))
    schema_module.plan_of.cache_clear()
    params, batch = make_params(), make_batch()

    def step(params: Any, batch: Any) -> Any:
        ddp = DistributedDataParallel(params, bucket_cap_mb=3)  # inside the traced function: once a trace
        return ddp.value_and_grad(loss_fn)(params, batch)[1]

    for _ in range(3):
        Replicas("checked", 2).shard_mapped(lambda p, b: step(p, b)).lower(params, batch)
    assert len(planned) == 1


def test_schema_of_equal_trees_is_made_once() -> None:
    first, second = DistributedDataParallel(make_params()), DistributedDataParallel(make_params())
    assert first.plan is second.plan


@pytest.mark.parametrize("strategy", ["flat", "tuple"])
def test_plan_of_another_framework_is_taken_over_by_name(strategy: Any) -> None:
    params, batch = make_params(), make_batch()
    specs = param_specs(params)
    foreign = plan_in_ready_order([specs[i] for i in (3, 0, 6, 1, 7, 5, 2, 4)], [40])  # registered in another order
    plan = plan_from_json(plan_to_json(foreign))
    ddp = DistributedDataParallel(params, plan=plan, strategy=strategy)
    assert ddp.plan is plan
    grads = Replicas("checked", 2)(lambda p, b: ddp.value_and_grad(loss_fn)(p, b)[1], params, batch)
    assert_all_close(grads, oracle(loss_fn, params, batch, 2))


W, B = ("w", (2,), "float32"), ("b", (3,), "float32")


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([W], "the pytree has the parameter 'b', which is not in the plan"),
        ([B, ("w", (3,), "float32")], r"'w' has shape \(2,\) in the pytree and \(3,\) in the plan"),
        ([B, ("w", (2,), "float64")], "'w' has dtype float32 in the pytree and float64 in the plan"),
        ([B, W, ("x", (), "float32")], "the plan has the parameter 'x', but the pytree has no such leaf"),
        ([B, W, ("n", (), "float32")], "the parameter 'n', but the pytree holds it as int32, which has no gradient"),
    ],
)
def test_first_difference_to_a_plan_is_named(specs: Any, message: str) -> None:
    plan = BucketPlan([ParamSpec(*spec) for spec in specs], [[i] for i in range(len(specs))])
    with pytest.raises(PlanError, match=message):
        DistributedDataParallel({"w": jnp.ones(2), "b": jnp.ones(3), "n": jnp.int32(1)}, plan=plan)


def test_params_that_are_not_those_of_the_plan(mapping: str) -> None:
    params, batch = make_params(), make_batch()
    ddp = DistributedDataParallel(params)
    params["scale"] = jnp.ones(2)
    with pytest.raises(PlanError, match=r"'scale' has shape \(2,\) in the pytree and \(\) in the plan"):
        Replicas(mapping, 2)(lambda p, b: ddp.value_and_grad(loss_fn)(p, b)[1], params, batch)
