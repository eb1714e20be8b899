"""Wrong use is a named error at trace time, never a factor of n."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from jax_cases import Replicas, assert_all_close, loss_fn, make_batch, make_params, mesh, oracle

from unified_ddp.errors import AxisError, MisuseError, PlanError
from unified_ddp.hooks import AllReduce
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


@pytest.mark.parametrize("hook", [AllReduce(), lambda bucket: jax.lax.pmean(bucket.storage, bucket.axis_name)])
def test_hook_and_a_bucket_of_which_some_is_split_over_a_model_axis(hook: Any) -> None:
    ddp = DistributedDataParallel({"split": jnp.ones(2), "whole": jnp.ones(4)}, comm_hook=hook)
    specs = {"split": P("model"), "whole": P()}
    mapped = jax.shard_map(
        lambda p: ddp.all_reduce(ddp.varying(p)), mesh=mesh(2, "data", 2, "model"), in_specs=(specs,), out_specs=specs
    )
    with pytest.raises(MisuseError, match=r"'whole' varies over .*\['data'\] and that of 'split'.*'model'\]"):
        jax.jit(mapped)({"split": jnp.ones(4), "whole": jnp.ones(4)})


@pytest.mark.parametrize("argnums", [0, (0, 1)])
def test_params_by_keyword(argnums: Any) -> None:
    ddp = DistributedDataParallel(make_params())
    with pytest.raises(TypeError, match=r"params are argument [01] .*but 0 positional arguments were given"):
        Replicas("vmap", 2)(lambda p, b: ddp.grad(loss_fn, argnums)(params=p, batch=b), make_params(), make_batch())


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


def test_a_second_reduction_of_summed_gradients_is_refused() -> None:
    params, batch = make_params(), make_batch()
    ddp = DistributedDataParallel(params)
    with pytest.raises(MisuseError, match=r"gradient of 'dense1.bias' and 7 more does not vary over .* 'data'"):
        Replicas("checked", 2)(lambda p, b: ddp.all_reduce(jax.grad(loss_fn)(p, b)), params, batch)


def test_reducing_twice_is_refused_or_harmless(mapping: str) -> None:
    params, batch = make_params(), make_batch()
    ddp = DistributedDataParallel(params)

    def step(params: Any, batch: Any) -> Any:
        return ddp.all_reduce(ddp.value_and_grad(loss_fn)(params, batch)[1])

    replicas = Replicas(mapping, 2)
    if mapping == "checked":
        with pytest.raises(MisuseError, match="they were reduced before"):
            replicas(step, params, batch)
    else:
        assert_all_close(replicas(step, params, batch), oracle(loss_fn, params, batch, 2))


def test_params_that_are_not_those_of_the_plan(mapping: str) -> None:
    params, batch = make_params(), make_batch()
    ddp = DistributedDataParallel(params)
    params["scale"] = jnp.ones(2)
    with pytest.raises(PlanError, match=r"'scale' has shape \(2,\) in the pytree and \(\) in the plan"):
        Replicas(mapping, 2)(lambda p, b: ddp.value_and_grad(loss_fn)(p, b)[1], params, batch)


def test_has_aux_without_a_pair() -> None:
    params, batch = make_params(), make_batch()
    ddp = DistributedDataParallel(params)
    with pytest.raises(TypeError, match=r"pair \(loss, aux\)"):
        Replicas("vmap", 2)(lambda p, b: ddp.value_and_grad(loss_fn, has_aux=True)(p, b)[1], params, batch)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"axis_name": ()}, ValueError, "one or more different names"),
        ({"axis_name": ("a", "a")}, ValueError, "one or more different names"),
        ({"axis_name": (1,)}, TypeError, "axis_name takes a string"),
        ({"strategy": "packed"}, ValueError, "strategy takes 'flat', 'tuple' or None, not 'packed'"),
        ({"bucket_cap_mb": 0}, ValueError, "bucket_cap_mb"),
        ({"bucket_cap_mb_list": []}, ValueError, "bucket_cap_mb_list"),
        (
            {"plan": DistributedDataParallel({"w": jnp.ones(2)}).plan, "bucket_cap_mb": 1},
            ValueError,
            "leave bucket_cap",
        ),
    ],
)
def test_wrong_options(options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        DistributedDataParallel({"w": jnp.ones(2)}, **options)
