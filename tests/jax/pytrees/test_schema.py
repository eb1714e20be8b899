"""Pytrees as parameter schemas, plans taken over from elsewhere, and what importing the adapter loads."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax_cases import Replicas

from unified_ddp.errors import PlanError
from unified_ddp.jax import DistributedDataParallel, param_specs

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
