"""Gradients summed over microbatches without sync, and reduced once."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax_cases import Replicas, assert_all_close, loss_fn, make_batch, make_params, oracle

from unified_ddp.jax import DistributedDataParallel

pytestmark = pytest.mark.timeout(120)

STEPS = 2


def _accumulating_step(ddp: DistributedDataParallel) -> Any:
    def step(params: Any, batch: Any) -> Any:
        microbatches = jax.tree.map(lambda x: x.reshape(STEPS, -1, *x.shape[1:]), batch)

        def body(total: Any, microbatch: Any) -> Any:
            loss, grads = ddp.value_and_grad(loss_fn, sync=False)(params, microbatch)
            return jax.tree.map(jnp.add, total, grads), loss

        total, losses = lax.scan(body, ddp.zero_gradients(params), microbatches)
        return ddp.mean(losses), ddp.all_reduce(jax.tree.map(lambda g: g / STEPS, total))

    return step


@pytest.mark.parametrize(("mapping", "strategy"), [("checked", "flat"), ("vmap", "tuple")])
def test_scan_over_microbatches_is_the_oracle(mapping: str, strategy: Any) -> None:
    params = make_params() | {"steps": jnp.int32(0)}
    batch = make_batch()
    ddp = DistributedDataParallel(params, strategy=strategy)
    _, grads = Replicas(mapping, 2)(_accumulating_step(ddp), params, batch)
    assert grads.pop("steps") is None
    assert_all_close(grads, oracle(loss_fn, make_params(), batch, 2 * STEPS))


def test_local_gradients_differ_by_replica(pair: Replicas) -> None:
    params, batch = make_params(), make_batch()
    ddp = DistributedDataParallel(params)
    grads = pair(lambda p, b: ddp.value_and_grad(loss_fn, sync=False)(p, b)[1], params, batch, local=True)
    for replica in range(2):
        shard = jax.tree.map(lambda x, r=replica: x.reshape(2, 4, -1)[r], batch)
        one = jax.tree.map(lambda g, r=replica: g[r : r + 1], grads)
        assert_all_close(one, oracle(loss_fn, params, shard, 1))


@pytest.mark.parametrize("mapping", ["checked", "unchecked"])
def test_one_reduction_and_none_inside_the_scan(mapping: str) -> None:
    params, batch = make_params(), make_batch()
    ddp = DistributedDataParallel(params, bucket_cap_mb=25, strategy="flat")
    step = _accumulating_step(ddp)
    text = Replicas(mapping, 2).shard_mapped(lambda p, b: step(p, b)[1]).lower(params, batch).as_text()
    lines = [line for line in text.splitlines() if re.search(r'= "?stablehlo\.(while|all_reduce)\b', line)]
    assert ["while" in line for line in lines] == [True, False]  # none in a function that the loop calls, either
    loop, reduction = (len(line) - len(line.lstrip()) for line in lines)
    assert loop == reduction
