"""Where a step lays what it is given: meshes, rows, scalars, batches that are filled up."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_cases import loss_fn, make_batch, make_params, mesh
from step_cases import RATE, assert_same, batches, make_step, plain_steps, run

from unified_ddp.errors import UnevenDataError
from unified_ddp.jax import DistributedDataParallel, pad_batch

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(("rows", "accumulate"), [(6, 1), (4, 2)])
def test_rows_that_cannot_be_shared_evenly(rows: int, accumulate: int) -> None:
    params = make_params()
    step = make_step(params, loss_fn, 4, accumulate=accumulate)
    message = rf"batch leaf 'x' has {rows} rows, which 4 replica\(s\) .* in {accumulate} microbatch.*pad_batch"
    with pytest.raises(UnevenDataError, match=message):
        step(step.init(params), jax.tree.map(lambda x: x[:rows], make_batch()))


def test_several_axes_need_a_mesh() -> None:
    ddp = DistributedDataParallel(make_params(), axis_name=("host", "device"))
    with pytest.raises(ValueError, match=r"give mesh=, as \('host', 'device'\)"):
        ddp.train_step(loss_fn, optax.sgd(0.1))


def test_leaves_that_are_no_arrays() -> None:
    params = make_params()
    step = make_step(params, loss_fn, 2)
    with pytest.raises(TypeError, match=r"leaf 'params\.act' is a function, no array; .* eqx\.partition"):
        step.init(params | {"act": lambda x: x})
    with pytest.raises(TypeError, match="batch leaf 'name' is a str"):
        step(step.init(params), make_batch() | {"name": "first"})


def test_pad_batch_takes_leaves_with_equally_many_rows() -> None:
    with pytest.raises(ValueError, match=re.escape("at most 4, not [2, 3]")):
        pad_batch({"x": np.ones(3), "y": np.ones(2)}, 4)
    with pytest.raises(ValueError, match=re.escape("at most 4, not [5]")):
        pad_batch(np.ones(5), 4)


def test_every_example_counts_the_same_in_a_batch_that_was_filled_up() -> None:
    params, whole = {"w": jnp.array([0.5, -1.0, 2.0])}, batches(1, 5)[0]
    batch, weight = pad_batch({"x": np.asarray(whole["x"])}, 8)
    assert weight.tolist() == [1, 1, 1, 1, 1, 0, 0, 0]

    def each(params: Any, batch: Any) -> Any:
        return jnp.log(jnp.abs(batch["x"] @ params["w"]))  # not finite for rows of zeros

    step = make_step(params, each, 4, optax.sgd(1.0))
    state, _ = run(step, params, [batch], weight=weight)
    want = jax.grad(lambda p: each(p, whole).mean())(params)
    assert_same(jax.tree.map(jnp.subtract, params, state.params), want, 1e-4)


def test_scalars_in_the_batch_go_to_all_replicas() -> None:
    params, batch = make_params(), make_batch()
    step = make_step(params, lambda p, b: b["factor"] * loss_fn(p, b), 2, optax.sgd(1.0), accumulate=2)
    one, two = (run(step, params, [batch | {"factor": f}])[1][0] for f in (1.0, 2.0))
    assert float(two) == 2 * float(one)


@pytest.mark.parametrize("strategy", ["flat", "tuple"])
def test_mesh_with_a_model_axis(strategy: Any) -> None:
    """Its axes are left to the compiler: params that are sharded over it stay so."""
    params = {"kernel": jax.random.normal(jax.random.key(0), (3, 4)), "bias": jnp.ones(4)}

    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean(jnp.tanh(batch["x"] @ params["kernel"] + params["bias"]).sum(1) ** 2)

    devices = mesh(2, "data", 2, "model")
    ddp = DistributedDataParallel(params, strategy=strategy)
    step = ddp.train_step(loss, optax.sgd(RATE, momentum=0.9), mesh=devices)
    split = NamedSharding(devices, P(None, "model"))
    placed = {"kernel": jax.device_put(params["kernel"], split), "bias": params["bias"]}
    state, _ = run(step, placed, batches())
    want, _ = plain_steps(loss, params, optax.sgd(RATE, momentum=0.9), batches(), 2)
    assert_same(state.params, want)
    assert state.params["kernel"].sharding.is_equivalent_to(split, 2)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_mesh_that_is_set(kind: AxisType) -> None:
    """jax.make_mesh makes explicit axes by default."""
    devices = jax.make_mesh((2,), ("data",), devices=jax.devices("cpu")[:2], axis_types=(kind,))
    with jax.set_mesh(devices):
        step = DistributedDataParallel(make_params()).train_step(loss_fn, optax.sgd(RATE), mesh=devices)
        state, _ = run(step, make_params(), batches())
    want, _ = plain_steps(loss_fn, make_params(), optax.sgd(RATE), batches(), 2)
    assert_same(state.params, want)


def test_two_data_axes() -> None:
    params = make_params()
    ddp = DistributedDataParallel(params, axis_name=("host", "device"))
    step = ddp.train_step(loss_fn, optax.sgd(RATE), mesh=mesh(2, "host", 2, "device"))
    state, _ = run(step, params, batches())
    want, _ = plain_steps(loss_fn, params, optax.sgd(RATE), batches(), 4)
    assert_same(state.params, want)
