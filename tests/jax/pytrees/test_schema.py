"""Pytrees as parameter schemas, plans taken over from elsewhere, and what importing the adapter loads."""

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax_cases import Replicas, assert_all_close, loss_fn, make_batch, make_params, oracle

from unified_ddp.errors import PlanError
from unified_ddp.jax import DistributedDataParallel, param_specs
from unified_ddp.plan import BucketPlan, ParamSpec, plan_from_json, plan_in_ready_order, plan_to_json

pytestmark = pytest.mark.timeout(120)


def test_names_shapes_and_dtypes() -> None:
    tree = {
        "conv1": {"kernel": jnp.ones((3, 3, 1, 4), jnp.bfloat16), "bias": jax.ShapeDtypeStruct((4,), jnp.float32)},
        "layers": [{"w": jnp.ones(2)}, (jnp.ones(3, jnp.complex64),)],
        "rate": 0.5,
    }
    assert [(spec.name, spec.shape, spec.dtype) for spec in param_specs(tree)] == [
        ("conv1.bias", (4,), "float32"),
        ("conv1.kernel", (3, 3, 1, 4), "bfloat16"),
        ("layers.0.w", (2,), "float32"),
        ("layers.1.0", (3,), "complex64"),
        ("rate", (), "float32"),
    ]


def test_leaves_without_gradients_are_skipped() -> None:
    tree = {"w": 1.0, "n": 3, "m": jnp.array(True), "i": jnp.arange(2), "k": jax.random.key(0), "f": abs, "none": None}
    assert [spec.name for spec in param_specs(tree)] == ["w"]
    with pytest.raises(PlanError, match="no leaf that can have a gradient"):
        DistributedDataParallel({"n": jnp.arange(3), "f": abs})


def test_two_leaves_of_one_name() -> None:
    with pytest.raises(PlanError, match=r"two leaves of the pytree are named 'a\.b'"):
        param_specs({"a": {"b": jnp.ones(1)}, "a.b": jnp.ones(2)})


def test_schema_of_equal_trees_is_made_once() -> None:
    first, second = DistributedDataParallel(make_params()), DistributedDataParallel(make_params())
    assert first.plan is second.plan


def test_static_data_that_cannot_be_hashed() -> None:
    @jax.tree_util.register_pytree_node_class
    class Node:
        def __init__(self, w: Any) -> None:
            self.w = w

        def tree_flatten(self) -> Any:
            return (self.w,), ["not hashable"]

        @classmethod
        def tree_unflatten(cls, _: Any, children: Any) -> Any:
            return cls(*children)

    ddp = DistributedDataParallel(Node(jnp.ones(3)))
    grads = Replicas("vmap", 2)(
        lambda n, x: ddp.value_and_grad(lambda n, x: (n.w * x).sum())(n, x)[1].w, Node(jnp.ones(3)), jnp.ones(2)
    )
    assert grads.tolist() == [[1, 1, 1]] * 2


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


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)


def test_import_loads_no_torch() -> None:
    result = _python("import sys, unified_ddp.jax; assert 'torch' not in sys.modules and 'flax' not in sys.modules")
    assert result.returncode == 0, result.stderr


WITHOUT_JAX = """
import sys

class NoJax:
    def find_spec(self, name, path=None, target=None):
        if name == "jax":
            raise ModuleNotFoundError("No module named 'jax'", name="jax")

sys.meta_path.insert(0, NoJax())
import unified_ddp
import unified_ddp.jax
"""


def test_import_without_jax_says_what_to_install() -> None:
    result = _python(WITHOUT_JAX)
    assert result.returncode != 0
    assert "ImportError: unified_ddp.jax needs JAX; install it with: pip install unified_ddp[jax]" in result.stderr
