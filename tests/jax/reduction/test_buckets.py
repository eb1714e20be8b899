"""Gradients that cannot be reduced, or not once more, are named errors at trace time, never a factor of n."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from jax_cases import Replicas, assert_all_close, loss_fn, make_batch, make_params, mesh, oracle

from unified_ddp.errors import MisuseError
from unified_ddp.hooks import AllReduce
from unified_ddp.jax import DistributedDataParallel

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("hook", [AllReduce(), lambda bucket: jax.lax.pmean(bucket.storage, bucket.axis_name)])
def test_hook_and_a_bucket_of_which_some_is_split_over_a_model_axis(hook: Any) -> None:
    ddp = DistributedDataParallel({"split": jnp.ones(2), "whole": jnp.ones(4)}, comm_hook=hook)
    specs = {"split": P("model"), "whole": P()}
    mapped = jax.shard_map(
        lambda p: ddp.all_reduce(ddp.varying(p)), mesh=mesh(2, "data", 2, "model"), in_specs=(specs,), out_specs=specs
    )
    with pytest.raises(MisuseError, match=r"'whole' varies over .*\['data'\] and that of 'split'.*'model'\]"):
        jax.jit(mapped)({"split": jnp.ones(4), "whole": jnp.ones(4)})


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
