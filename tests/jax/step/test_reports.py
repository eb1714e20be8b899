"""Steps that cannot be taken, or are not to be: named, and the state stays as it was."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax_cases import loss_fn, make_batch, make_params, mesh
from step_cases import assert_same, make_step

from unified_ddp.errors import AxisError, NonFiniteError, UnevenDataError
from unified_ddp.jax import DistributedDataParallel, pad_batch

pytestmark = pytest.mark.timeout(120)


def _spoilt(row: int) -> Any:
    """Divides by zero in one row: the gradients of what comes after it are not finite."""
    batch = make_batch()
    return batch | {"y": batch["y"].at[row].set(jnp.inf)}


def test_skip_leaves_everything_on_all_replicas() -> None:
    params = make_params()
    step = make_step(params, _counting, 4, optax.adam(0.1), on_nonfinite="skip")
    state, _ = step(step.init(params, jnp.int32(0)), make_batch())
    after, loss = step(state, _spoilt(5))
    assert not jnp.isfinite(loss)
    for name in ("params", "opt_state", "buffers"):
        assert_same(getattr(after, name), getattr(state, name), 0)
    assert (int(after.step), int(after.skipped)) == (2, 1)
    again, _ = step(after, make_batch())
    assert (int(again.buffers), int(again.skipped)) == (2, 1)
    assert bool(jnp.all(jnp.isfinite(again.params["scale"])))


def _counting(params: Any, batch: Any, buffers: Any) -> Any:
    return loss_fn(params, batch), buffers + 1


@pytest.mark.parametrize("accumulate", [1, 2])
def test_raise_names_parameters_and_replica(accumulate: int) -> None:
    params = make_params()
    step = make_step(params, loss_fn, 4, on_nonfinite="raise", accumulate=accumulate)
    state = step.init(params)
    batch = make_batch() if accumulate == 1 else jax.tree.map(lambda x: jnp.tile(x, (2, 1)), make_batch())
    state, _ = step(state, batch)
    spoilt = batch | {"y": batch["y"].at[5 * accumulate].set(jnp.inf)}
    with pytest.raises(
        NonFiniteError, match=r"step 1: .*'dense1\.bias'.* and \d more on replica 2\. State is unch"
    ) as e:
        step(state, spoilt)
    assert "replica 1" not in str(e.value)
    step(state, batch)


def test_raise_tells_a_sum_that_overflowed() -> None:
    params = {"w": jnp.ones(2)}
    step = make_step(params, lambda p, b: 6e4 * (p["w"].sum() * b.mean()), 4, reduce_dtype=jnp.float16)
    assert not jnp.isfinite(step(step.init(params), jnp.full(4, 5.0))[0].params["w"]).any()
    step = make_step(
        params, lambda p, b: 6e4 * (p["w"].sum() * b.mean()), 4, reduce_dtype=jnp.float16, on_nonfinite="raise"
    )
    with pytest.raises(NonFiniteError, match="'w' in the mean over replicas, though on no replica: the sum overflowed"):
        step(step.init(params), jnp.full(4, 5.0))


def test_ignore_hands_it_to_the_optimizer() -> None:
    params = make_params()
    step = make_step(params, loss_fn, 2)
    state, _ = step(step.init(params), _spoilt(0))
    assert not jnp.isfinite(state.params["scale"])


@pytest.mark.parametrize(("rows", "accumulate"), [(6, 1), (4, 2)])
def test_rows_that_cannot_be_shared_evenly(rows: int, accumulate: int) -> None:
    params = make_params()
    step = make_step(params, loss_fn, 4, accumulate=accumulate)
    message = rf"batch leaf 'x' has {rows} rows, which 4 replica\(s\) .* in {accumulate} microbatch.*pad_batch"
    with pytest.raises(UnevenDataError, match=message):
        step(step.init(params), jax.tree.map(lambda x: x[:rows], make_batch()))


def _per_row(params: Any, batch: Any) -> Any:
    return jnp.ones(len(batch["x"])) * loss_fn(params, batch)


@pytest.mark.parametrize(
    ("loss", "options", "arguments", "buffers", "message"),
    [
        (_per_row, {}, {}, None, r"returned a loss of shape \(4,\); return the mean over the batch, or pass weight="),
        (loss_fn, {}, {"weight": np.ones(8)}, None, r"a weight of shape \(4,\) a microbatch, the loss must have that"),
        (loss_fn, {"has_aux": True}, {}, None, r"is to return \(loss, aux\), but it returned one"),
        (lambda p, b: (loss_fn(p, b), {}), {}, {}, None, r"the loss alone, but it returned 2 values; has_aux=True is"),
        (lambda p, b, buffers: loss_fn(p, b), {}, {}, jnp.ones(2), r"is to return \(loss, buffers\)"),
        (
            lambda p, b, buffers: (loss_fn(p, b), buffers),
            {"has_aux": True},
            {},
            jnp.ones(2),
            r"is to return \(loss, buffers, aux\), but it returned 2 values",
        ),
        (
            lambda p, b, buffers: (loss_fn(p, b), buffers[:1]),
            {},
            {},
            jnp.ones(2),
            r"buffers of another structure, shape or dtype .*float32\[2\].* became .*float32\[1\]",
        ),
    ],
)
def test_what_the_loss_function_returns(loss: Any, options: Any, arguments: Any, buffers: Any, message: str) -> None:
    params = make_params()
    step = make_step(params, loss, 2, **options)
    with pytest.raises(TypeError, match=message):
        step(step.init(params, buffers), make_batch(), **arguments)


def test_what_a_step_takes() -> None:
    params = make_params()
    step = make_step(params, loss_fn, 2)
    with pytest.raises(TypeError, match="takes the state that init or the step before returned, not dict"):
        step(params, make_batch())
    with pytest.raises(TypeError, match=r"is jitted already.*call it outside jax\.jit"):
        jax.jit(step)(step.init(params), make_batch())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"reduction": "sum"}, ValueError, "reduction takes 'weighted_mean', 'mean', not 'sum'"),
        ({"buffer_sync": "sum"}, ValueError, "buffer_sync takes"),
        ({"on_nonfinite": "stop"}, ValueError, "on_nonfinite takes"),
        ({"accumulate": 0}, ValueError, "accumulate takes a number of microbatches, 1 or more, not 0"),
        ({"compute_dtype": jnp.int8}, ValueError, "compute_dtype takes a floating-point type"),
        ({"donate": True, "on_nonfinite": "raise"}, ValueError, "gives the old state away"),
        ({"mesh": mesh(2, "batch")}, AxisError, "the mesh has no axis 'data', only 'batch'"),
    ],
)
def test_wrong_options(options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        DistributedDataParallel(make_params()).train_step(loss_fn, optax.sgd(0.1), **options)


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


@pytest.mark.parametrize(
    ("trainable", "error", "message"),
    [
        ({"dense": True}, ValueError, "structure does not fit params"),
        (lambda name: 1, TypeError, "returned 1 for"),
        ("scale", TypeError, "trainable takes a pytree of bools or a function of a name, not 'scale'"),
    ],
)
def test_wrong_filters(trainable: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        DistributedDataParallel(make_params(), trainable=trainable)


def test_wrong_reduce_dtype() -> None:
    with pytest.raises(ValueError, match="reduce_dtype takes a floating-point type"):
        DistributedDataParallel(make_params(), reduce_dtype=jnp.int8)


def test_pad_batch_takes_leaves_with_equally_many_rows() -> None:
    with pytest.raises(ValueError, match=re.escape("at most 4, not [2, 3]")):
        pad_batch({"x": np.ones(3), "y": np.ones(2)}, 4)
    with pytest.raises(ValueError, match=re.escape("at most 4, not [5]")):
        pad_batch(np.ones(5), 4)
