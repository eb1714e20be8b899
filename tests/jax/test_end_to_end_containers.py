"""The same model in every container that users keep parameters in."""

import dataclasses
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax_cases import Replicas, assert_all_close, loss_fn, make_batch, make_params, oracle

from unified_ddp.jax import DistributedDataParallel, param_specs

pytestmark = pytest.mark.timeout(120)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Dense:
    kernel: Any
    bias: Any = None


def _frozen_dict() -> Any:
    return flax.core.freeze(make_params()), loss_fn


def _dataclass() -> Any:
    params = make_params()
    params |= {name: Dense(**params[name]) for name in ("dense1", "dense2", "head")}

    def loss(p: Any, batch: Any) -> Any:
        return loss_fn(p | {name: vars(p[name]) for name in ("dense1", "dense2", "head")}, batch)

    return params, loss


def _list() -> Any:
    params = make_params()
    return list(params.values()), lambda p, batch: loss_fn(dict(zip(params, p, strict=True)), batch)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = nnx.List([nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)])
        self.norm = nnx.BatchNorm(4, use_running_average=True, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.dense[1](self.norm(jnp.tanh(self.dense[0](x))))


def _nnx_state() -> Any:
    graph, params, rest = nnx.split(Model(nnx.Rngs(0)), nnx.Param, ...)
    return params, lambda p, batch: jnp.mean((nnx.merge(graph, p, rest)(batch["x"]) - batch["y"]) ** 2)


CONTAINERS = [_frozen_dict, _dataclass, _list, _nnx_state]


@pytest.mark.parametrize("container", CONTAINERS)
def test_container(container: Any) -> None:
    params, loss = container()
    batch = make_batch()
    ddp = DistributedDataParallel(params)
    grads = Replicas("checked", 2)(lambda p, b: ddp.value_and_grad(loss)(p, b)[1], params, batch)
    assert_all_close(grads, oracle(loss, params, batch, 2))


def test_a_bare_array() -> None:
    ddp = DistributedDataParallel(jnp.ones(3))
    grads = Replicas("vmap", 2)(
        lambda w, x: ddp.value_and_grad(lambda w, x: (w * x).sum())(w, x)[1], jnp.ones(3), jnp.arange(2.0)
    )
    assert np.array_equal(grads, np.full((2, 3), 0.5))


def test_names_of_flax_nnx_leave_value_out() -> None:
    params, _ = _nnx_state()
    assert [spec.name for spec in param_specs(params)] == [
        "dense.0.bias",
        "dense.0.kernel",
        "dense.1.bias",
        "dense.1.kernel",
        "norm.bias",
        "norm.scale",
    ]


def test_names_are_the_same_in_every_container() -> None:
    names = {spec.name for spec in param_specs(make_params())}
    assert "dense1.kernel" in names
    for container in (_frozen_dict, _dataclass):
        assert {spec.name for spec in param_specs(container()[0])} == names
