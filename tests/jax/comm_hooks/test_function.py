"""Comm hooks: what they get, and what they may return."""

from typing import Any

import jax.numpy as jnp
import pytest
from jax import lax
from jax_cases import Replicas, assert_all_close, loss_fn, make_batch, make_params, oracle

from unified_ddp.errors import MisuseError
from unified_ddp.jax import DistributedDataParallel, JaxBucket
from unified_ddp.plan import MIB

pytestmark = pytest.mark.timeout(120)


def mean_hook(bucket: JaxBucket) -> Any:
    return lax.psum(bucket.storage, bucket.axis_name) / bucket.axis_size


def compressed_hook(bucket: JaxBucket) -> Any:
    return lax.psum(bucket.storage.astype(jnp.bfloat16) / bucket.axis_size, bucket.axis_name).astype(jnp.float32)


@pytest.mark.parametrize(("hook", "tolerance"), [(mean_hook, 1e-5), (compressed_hook, 2e-2)])
def test_hook_reduces_every_bucket(pair: Replicas, hook: Any, tolerance: float) -> None:
    params, batch = make_params(), make_batch()
    seen: list[JaxBucket] = []

    def recording(bucket: JaxBucket) -> Any:
        seen.append(bucket)
        return hook(bucket)

    ddp = DistributedDataParallel(params, bucket_cap_mb=40 / MIB, comm_hook=recording)
    grads = pair(lambda p, b: ddp.value_and_grad(loss_fn)(p, b)[1], params, batch)
    assert_all_close(grads, oracle(loss_fn, params, batch, 2), tolerance)
    plan = ddp.plan
    assert [bucket.index for bucket in seen] == list(range(len(plan.buckets)))
    assert [bucket.is_last for bucket in seen] == [False] * (len(seen) - 1) + [True]
    assert [bucket.parameters for bucket in seen] == [
        tuple(plan.params[i].name for i in bucket.params) for bucket in plan.buckets
    ]
    assert {bucket.axis_name for bucket in seen} == {("data",)}
    for bucket, spec in zip(seen, plan.buckets, strict=True):
        assert bucket.storage.shape == (spec.numel,)


def test_gradients_of_a_bucket_have_their_shapes() -> None:
    params, batch = make_params(), make_batch()
    shapes = {}

    def hook(bucket: JaxBucket) -> Any:
        shapes.update(zip(bucket.parameters, (g.shape for g in bucket.gradients()), strict=True))
        return mean_hook(bucket)

    ddp = DistributedDataParallel(params, comm_hook=hook)
    Replicas("vmap", 2)(lambda p, b: ddp.value_and_grad(loss_fn)(p, b)[1], params, batch)
    assert shapes == {spec.name: spec.shape for spec in ddp.plan.params}


@pytest.mark.parametrize(
    "wrong",
    [lambda b: b.storage[1:], lambda b: b.storage.astype(jnp.bfloat16), lambda b: None],
    ids=["shape", "dtype", "none"],
)
def test_wrong_result_of_a_hook_is_named(wrong: Any) -> None:
    params, batch = make_params(), make_batch()
    ddp = DistributedDataParallel(params, comm_hook=wrong)
    with pytest.raises(MisuseError, match=r"comm hook .* bucket 0 \(unused, scale, head.kernel and 5 more\)"):
        Replicas("vmap", 2)(lambda p, b: ddp.value_and_grad(loss_fn)(p, b)[1], params, batch)
