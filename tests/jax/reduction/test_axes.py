"""Axes that are not mapped where a call needs them are named errors at trace time."""

import sys

import jax
import pytest
from jax_cases import Replicas, loss_fn, make_batch, make_params, mesh

from unified_ddp.errors import AxisError
from unified_ddp.jax import DistributedDataParallel

pytestmark = pytest.mark.timeout(120)


CALLS = {
    "value_and_grad": lambda ddp, params, batch: ddp.value_and_grad(loss_fn)(params, batch),
    "grad": lambda ddp, params, batch: ddp.grad(loss_fn)(params, batch),
    "all_reduce": lambda ddp, params, batch: ddp.all_reduce(params),
    "mean": lambda ddp, params, batch: ddp.mean(1.0),
    "sync_buffers": lambda ddp, params, batch: ddp.sync_buffers(batch),
    "broadcast_from": lambda ddp, params, batch: ddp.broadcast_from(params),
    "varying": lambda ddp, params, batch: ddp.varying(params),
    "zero_gradients": lambda ddp, params, batch: ddp.zero_gradients(params),
}


@pytest.mark.parametrize("name", CALLS)
def test_outside_any_mapped_axis(name: str) -> None:
    params, batch = make_params(), make_batch()
    ddp = DistributedDataParallel(params)
    for call in (CALLS[name], lambda *args: jax.jit(lambda p, b: CALLS[name](args[0], p, b))(*args[1:])):
        known = {"grad": "value_and_grad"}.get(name, name)
        with pytest.raises(AxisError, match=rf"\.{known} needs the mapped axis 'data', but no mapped axis is in scope"):
            call(ddp, params, batch)


def test_axis_of_the_mesh_that_is_not_mapped() -> None:
    params, batch = make_params(), make_batch()
    ddp = DistributedDataParallel(params)
    with jax.set_mesh(mesh(2, "data")), pytest.raises(AxisError, match=r"Call it inside jax\.shard_map"):
        jax.jit(lambda p, b: ddp.value_and_grad(loss_fn)(p, b))(params, batch)


@pytest.mark.parametrize("name", CALLS)
def test_wrong_axis_name(mapping: str, name: str) -> None:
    params, batch = make_params(), make_batch()
    ddp = DistributedDataParallel(params, axis_name=("batch", "data"))
    with pytest.raises(AxisError, match=r"needs the mapped axis 'data', but the mapped axes in scope here are 'batch'"):
        Replicas(mapping, 2, axis="batch")(lambda p, b: CALLS[name](ddp, p, b), params, batch)


def test_a_jax_that_hides_the_axes_in_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax._src.core", None)
    with pytest.raises(
        AxisError, match=r"mean needs the mapped axis 'data', but the axis 'data' is not in scope here\. Call"
    ):
        DistributedDataParallel(make_params()).mean(1.0)
