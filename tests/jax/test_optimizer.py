"""The reduction as an optax transformation."""

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax_cases import Replicas, assert_all_close, loss_fn, make_batch, make_params, oracle

from unified_ddp.errors import AxisError, MisuseError
from unified_ddp.jax import all_reduce_gradients, varying

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(("mapping", "strategy"), [("checked", "flat"), ("vmap", "tuple")])
def test_updates_are_those_of_the_mean_gradients(mapping: str, strategy: Any) -> None:
    params, batch = make_params(), make_batch()
    optimizer = optax.chain(all_reduce_gradients(strategy=strategy), optax.scale(-2.0))

    def step(params: Any, batch: Any) -> Any:
        grads = jax.grad(loss_fn)(varying(params), batch)
        return optimizer.update(grads, optimizer.init(params), params)[0]

    want = jax.tree.map(lambda g: -2 * g, oracle(loss_fn, params, batch, 2))
    assert_all_close(Replicas(mapping, 2)(step, params, batch), want)


def test_gradients_that_are_summed_already_are_refused() -> None:
    params, batch = make_params(), make_batch()
    optimizer = all_reduce_gradients()

    def step(params: Any, batch: Any) -> Any:
        return optimizer.update(jax.grad(loss_fn)(params, batch), optimizer.init(params))[0]

    with pytest.raises(MisuseError, match="JAX has already summed the gradients of replicated params"):
        Replicas("checked", 2)(step, params, batch)


def test_frozen_parameters_and_those_without_gradients() -> None:
    params = {"w": jnp.ones(2), "held": jnp.ones(2), "n": None}
    optimizer = all_reduce_gradients("data", trainable=lambda name: name != "held")

    def step(params: Any, x: Any) -> Any:
        grads = {"w": x * params["w"], "held": params["held"], "n": None}
        return optimizer.update(grads, optimizer.init(params))[0]

    updates = Replicas("vmap", 2)(step, params, jnp.array([1.0, 3.0]))
    assert updates["w"].tolist() == [[2, 2]] * 2
    assert updates["held"].tolist() == [[1, 1]] * 2


def test_outside_any_mapped_axis() -> None:
    params = make_params()
    with pytest.raises(AxisError, match="needs the mapped axis 'data', but no mapped axis is in scope"):
        all_reduce_gradients().update(params, optax.EmptyState())
    with pytest.raises(AxisError, match="needs the mapped axis 'data'"):
        varying(params)


def test_without_optax() -> None:
    code = "import sys; sys.modules['optax'] = None\nimport unified_ddp.jax\nunified_ddp.jax.all_reduce_gradients()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert "ImportError: all_reduce_gradients needs optax; install it with: pip install optax" in result.stderr
