"""The hook that breaks one bucket on purpose, on the host."""

import numpy as np
import pytest
from support.host_ranks import reduce_on_host

from unified_ddp.equivalence.demo.config import Fault, Side, VerifyConfig
from unified_ddp.equivalence.demo.faults import faulty_hook
from unified_ddp.hooks import BucketLayout


def steps(fault, bucket, count=2, world_size=3):
    """Returns, by step, every rank's local gradients of one bucket and what the hook makes of them."""
    hook = faulty_hook(VerifyConfig(world_size=world_size, inject=fault, inject_rank=1), Side.TORCH)
    layout = BucketLayout(bucket, "float64", ("w",), ((4,),))
    states = [hook.init(layout) for _ in range(world_size)]
    for step in range(count):
        local = [np.random.default_rng([step, rank]).normal(size=4) for rank in range(world_size)]
        reduced, states = reduce_on_host(hook, layout, states, [own.copy() for own in local])
        yield local, reduced


@pytest.mark.parametrize("fault", [Fault.SKIP_BUCKET, Fault.SUM, Fault.STALE_RANK])
def test_other_buckets_are_averaged(fault):
    for local, reduced in steps(fault, bucket=0):
        np.testing.assert_allclose(reduced, [np.mean(local, axis=0)] * 3)


def test_a_skipped_bucket_stays_local():
    for local, reduced in steps(Fault.SKIP_BUCKET, bucket=1):
        np.testing.assert_array_equal(reduced, local)


def test_a_sum_is_not_divided():
    for local, reduced in steps(Fault.SUM, bucket=1):
        np.testing.assert_allclose(reduced, [np.sum(local, axis=0)] * 3)


def test_a_stale_rank_is_one_step_behind():
    before = None
    for local, reduced in steps(Fault.STALE_RANK, bucket=1, count=3):
        contributed = [local[0], local[1] if before is None else before[1], local[2]]
        np.testing.assert_allclose(reduced, [np.mean(contributed, axis=0)] * 3)
        before = local


def test_only_the_side_at_fault_breaks_its_reduction():
    config = VerifyConfig(inject=Fault.SUM, inject_into=Side.JAX)
    assert faulty_hook(config, Side.TORCH) is None
    assert faulty_hook(config, Side.JAX) is not None
    assert faulty_hook(VerifyConfig(inject=Fault.DIE), Side.TORCH) is None
