"""What a comm hook is given."""

import pytest
import torch
import torch.distributed as dist
from support.buckets import bucket_of
from torch import nn

from unified_ddp.torch import GradBucket
from unified_ddp.torch.reduction.sparse import SparseBucketStorage
from unified_ddp.torch.reduction.storage import BucketState, BucketStorage


def dense() -> tuple[GradBucket, BucketStorage]:
    params = [
        nn.Parameter(torch.randn(2, 3)),
        nn.Parameter(torch.randn(())),
        nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)),
    ]
    storage = BucketStorage(bucket_of(params), params, as_views=False)
    storage.flat.normal_()
    return GradBucket(4, True, storage, ["a", "b", "c"]), storage


def test_it_has_all_of_torchs_interface() -> None:
    public = {name for name in vars(dist.GradBucket) if not name.startswith("_")}
    assert public <= set(vars(GradBucket))


def test_what_it_tells() -> None:
    bucket, storage = dense()
    assert (bucket.index(), bucket.is_last(), bucket.names()) == (4, True, ("a", "b", "c"))
    assert bucket.buffer() is storage.flat
    assert bucket.buffer().dim() == 1
    assert [p is q for p, q in zip(bucket.parameters(), storage.params, strict=True)] == [True] * 3
    assert GradBucket(0, False, storage).names() == ()


@pytest.mark.parametrize("replaced", [False, True])
def test_gradients_are_views_of_the_buffer(replaced: bool) -> None:
    bucket, storage = dense()
    if replaced:
        before = storage.flat.clone()
        bucket.set_buffer(torch.randn_like(storage.flat))
    grads = bucket.gradients()
    assert [g.shape for g in grads] == [p.shape for p in bucket.parameters()]
    assert [g.stride() for g in grads] == [p.stride() for p in bucket.parameters()]
    bucket.buffer().fill_(3)
    assert all(bool((g == 3).all()) for g in grads)
    grads[1].fill_(5)
    assert bucket.buffer().sum() == 3 * (bucket.buffer().numel() - 1) + 5
    if replaced:
        assert torch.equal(storage.flat, before)  # the storage knows nothing of it


def test_the_lists_are_the_callers() -> None:
    bucket, storage = dense()
    bucket.gradients().clear()
    bucket.parameters().clear()
    assert len(bucket.gradients()) == len(bucket.parameters()) == len(storage.views) == 3


def test_a_sparse_gradient() -> None:
    param = nn.Parameter(torch.randn(4, 2))
    storage = SparseBucketStorage(bucket_of([param]), param)
    param.grad = torch.eye(4, 2).to_sparse(1)
    storage.pack_rest(1.0, BucketState())
    bucket = GradBucket(0, False, storage, ["table"])
    assert bucket.buffer().is_sparse
    assert torch.equal(bucket.buffer().to_dense(), torch.eye(4, 2))
    assert [g.shape for g in bucket.gradients()] == [(4, 2)]
    assert bucket.parameters() == [param]
