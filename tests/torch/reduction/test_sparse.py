"""A bucket of one sparse gradient."""

import pytest
import torch
from support.buckets import bucket_of
from torch import nn

from unified_ddp.errors import ReductionError
from unified_ddp.passes import BucketState
from unified_ddp.torch.reduction.sparse import SparseBucketStorage


def rows(*indices: int, shape: tuple[int, ...] = (5, 2), dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A gradient in these rows, which may repeat."""
    values = torch.randn(len(indices), *shape[1:], dtype=dtype)
    return torch.sparse_coo_tensor(torch.tensor([indices]), values, shape)


def storage_of(shape: tuple[int, ...] = (5, 2), dtype: torch.dtype = torch.float32) -> SparseBucketStorage:
    param = nn.Parameter(torch.randn(*shape, dtype=dtype))
    return SparseBucketStorage(bucket_of([param]), param)


@pytest.mark.parametrize("scale", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("shape", [(5, 2), (5,), (5, 2, 3), (5, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
def test_a_round_trip(scale: float, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    storage, state = storage_of(shape, dtype), BucketState()
    held = storage.params[0].grad = rows(3, 1, 3, shape=shape, dtype=dtype)
    local = held.to_dense()
    storage.pack_one(0, scale, state)  # is left to the launch
    storage.pack_rest(scale, state)
    assert storage.views[0] is storage.flat
    assert torch.equal(storage.flat.to_dense(), local * scale)
    assert torch.equal(held.to_dense(), local)
    reduced = storage.flat + rows(0, 1, shape=shape, dtype=dtype)
    want = reduced.to_dense()
    assert storage.unpack(reduced, (), state) == [0]
    assert storage.params[0].grad is held
    assert held.is_sparse
    assert torch.equal(held.to_dense(), want)
    assert storage.flat._nnz() == 0
    assert not state.absent


def test_a_scale_of_zero_takes_anything_for_zeros() -> None:
    storage, state = storage_of(), BucketState()
    storage.params[0].grad = rows(1) * float("nan")
    storage.pack_rest(0.0, state)
    assert storage.flat._nnz() == 0
    assert not state.absent


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_missing_gradient(elsewhere: bool) -> None:
    storage, state = storage_of(), BucketState()
    storage.pack_rest(0.5, state)
    assert state.absent == {0}
    assert (storage.flat._nnz(), storage.flat.shape) == (0, (5, 2))
    reduced = rows(2) if elsewhere else storage.flat
    want = reduced.to_dense()
    storage.unpack(reduced, (), state)
    assert state.lent == ({0} if elsewhere else set())
    assert torch.equal(storage.params[0].grad.to_dense(), want)


@pytest.mark.parametrize("held", [False, True])
def test_what_is_to_be_kept(held: bool) -> None:
    storage, state = storage_of(), BucketState()
    grad = storage.params[0].grad = rows(1) if held else None
    before = grad.to_dense() if held else None
    storage.pack_rest(0.5, state)
    assert storage.unpack(rows(2), {0}, state) == []
    assert storage.params[0].grad is grad
    assert before is None or torch.equal(grad.to_dense(), before)


def test_a_dense_gradient_stays_dense() -> None:
    storage, state = storage_of(), BucketState()
    held = storage.params[0].grad = torch.zeros(5, 2)
    held[3] = 1
    storage.pack_rest(0.5, state)
    assert storage.flat.is_sparse
    assert storage.flat._nnz() == 1
    other = rows(0)
    assert storage.unpack(storage.flat + other, (), state) == [0]
    want = other.to_dense()
    want[3] += 0.5
    assert storage.params[0].grad is held
    assert torch.equal(held, want)


def test_a_dense_result_replaces_a_sparse_gradient() -> None:
    storage, state = storage_of(), BucketState()
    storage.params[0].grad = rows(1)
    storage.pack_rest(1.0, state)
    made = torch.randn(5, 2)
    storage.unpack(made, (), state)
    assert torch.equal(storage.params[0].grad, made)


def test_gradients_of_a_context() -> None:
    storage, state = storage_of(), BucketState()
    (param,) = storage.params
    context = {param: rows(1, 4)}
    want = context[param].to_dense() / 2
    storage.pack_rest(0.5, state, context)
    assert storage.unpack(storage.flat, (), state, context) == []
    assert torch.equal(context[param].to_dense(), want)
    assert param.grad is None


def test_a_context_without_a_gradient_that_others_have() -> None:
    storage, state = storage_of(), BucketState()
    storage.pack_rest(0.5, state, {})
    storage.unpack(storage.flat, (), state, {})
    assert storage.params[0].grad is None
    with pytest.raises(ReductionError, match=r"shape \(5, 2\) has a gradient on another rank"):
        storage.unpack(rows(1), (), state, {})
    assert storage.params[0].grad is None
