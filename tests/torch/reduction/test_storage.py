"""The flat memory of one bucket: what is packed, in which layout, and what becomes of `.grad`."""

from typing import Any

import pytest
import torch
from support.buckets import bits, bucket_of
from torch import nn

from unified_ddp.errors import ReductionError
from unified_ddp.passes import BucketState
from unified_ddp.torch.reduction.storage import BucketStorage, LocalGradients, gradient_views, scale_gradient

LAYOUTS: dict[str, torch.Tensor] = {
    "row-major": torch.randn(3, 4),
    "transposed": torch.randn(4, 3).t(),
    "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "permuted": torch.randn(2, 3, 4).permute(2, 0, 1),
    "strides without a meaning": torch.randn(3).as_strided((1, 3, 1), (7, 1, 9)),
    "scalar": torch.randn(()),
    "empty": torch.randn(0, 3),
    "empty inside": torch.randn(3, 0),
    "with holes": torch.randn(4, 6)[:, ::2],
    "expanded": torch.randn(3, 1).expand(3, 4),
    "double": torch.randn(3, 2, dtype=torch.float64),
    "bfloat16": torch.randn(5, dtype=torch.bfloat16),
    "complex": torch.randn(3, 2, dtype=torch.complex64),
}
KEPT = {"row-major", "transposed", "channels_last", "permuted"}
"""Layouts whose strides the gradients have, too."""
SCALES = [1.0, 0.5, 0.0]


def params_like(*layouts: str) -> list[nn.Parameter]:
    return [nn.Parameter(LAYOUTS[name].detach()) for name in layouts]


def storage_of(params: list[nn.Parameter], as_views: bool = False, dtype: torch.dtype | None = None) -> BucketStorage:
    return BucketStorage(bucket_of(params), params, as_views, dtype)


def gradient_like(param: torch.Tensor) -> torch.Tensor:
    return torch.randn(param.shape, dtype=param.dtype)


# --- views


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_cover_the_memory_once(layout: str) -> None:
    params = params_like(layout, layout)
    spec = bucket_of(params)
    flat = torch.full((spec.numel,), float("nan"), dtype=params[0].dtype)
    views = gradient_views(flat, spec, params)
    for i, (view, param) in enumerate(zip(views, params, strict=True)):
        assert (view.shape, view.dtype) == (param.shape, param.dtype)
        if layout in KEPT:
            assert view.stride() == param.stride()
        values = torch.arange(view.numel()).reshape(view.shape) + 100 * i
        view.copy_(values)
        assert torch.equal(view, values.to(view.dtype))
    count = params[0].numel()
    want = sorted([*range(count), *range(100, 100 + count)])
    assert sorted(flat.real.float().tolist()) == torch.tensor(want).to(flat.dtype).real.float().tolist()


def test_layouts_lie_one_behind_the_other() -> None:
    params = params_like("scalar", "channels_last", "empty", "with holes", "row-major")
    storage = storage_of(params)
    assert storage.flat.shape == (sum(p.numel() for p in params),)
    for i, view in enumerate(storage.views):
        view.fill_(i)
    assert storage.flat.tolist() == [i for i, p in enumerate(params) for _ in range(p.numel())]


# --- packing


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("as_views", [False, True])
def test_a_round_trip(layout: str, scale: float, one_by_one: bool, as_views: bool) -> None:
    """Packed, scaled, reduced in place (here: doubled) and unpacked."""
    params, state = params_like(layout, layout), BucketState()
    storage = storage_of(params, as_views)
    grads = [gradient_like(p) for p in params]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    before = [p.grad for p in params]
    if one_by_one:
        storage.pack_one(1, scale, state)
        assert state.packed == {1}
    storage.pack_rest(scale, state)
    for view, grad in zip(storage.views, grads, strict=True):
        assert torch.equal(view, grad * scale)
    assert all((p.grad is v) == as_views for p, v in zip(params, storage.views, strict=True))
    storage.flat.mul_(2)
    assert list(storage.unpack(storage.flat, (), state)) == [0, 1]
    for param, held, grad, view in zip(params, before, grads, storage.views, strict=True):
        assert torch.equal(param.grad, grad * scale * 2)
        assert param.grad is (view if as_views else held)
    assert not state.absent


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_scale_of_zero_takes_anything_for_zeros(one_by_one: bool, bad: float) -> None:
    params, state = params_like("row-major"), BucketState()
    storage = storage_of(params)
    storage.flat.fill_(7)
    params[0].grad = torch.full_like(params[0], bad)
    if one_by_one:
        storage.pack_one(0, 0.0, state)
    storage.pack_rest(0.0, state)
    assert bits(storage.flat) == bits(torch.zeros(12))


@pytest.mark.parametrize("one_by_one", [False, True])
def test_what_is_packed_already_is_scaled_once(one_by_one: bool) -> None:
    params, state = params_like("row-major", "transposed", "scalar"), BucketState()
    storage = storage_of(params, as_views=True)
    for param, view in zip(params, storage.views, strict=True):
        param.grad = view.fill_(3)  # as the pass before left it
    if one_by_one:
        storage.pack_one(1, 0.5, state)
        storage.pack_one(2, 0.5, state)
    storage.pack_rest(0.5, state)
    assert torch.equal(storage.flat, torch.full_like(storage.flat, 1.5))


def test_gradients_of_other_dtypes_and_sparse_ones() -> None:
    for one_by_one in (False, True):
        params, state = params_like("row-major", "row-major"), BucketState()
        storage = storage_of(params, dtype=torch.float64)
        params[0].grad = torch.randn(3, 4)
        params[1].grad = torch.randn(3, 4).to_sparse()
        want = [params[0].grad.double() / 4, params[1].grad.to_dense().double() / 4]
        if one_by_one:
            storage.pack_one(0, 0.25, state)
            storage.pack_one(1, 0.25, state)
        storage.pack_rest(0.25, state)
        assert all(map(torch.equal, storage.views, want))
        storage.unpack(storage.flat, (), state)
        for param, expected in zip(params, want, strict=True):
            assert param.grad.layout is torch.strided
            assert torch.equal(param.grad, expected.float())


def test_packing_leaves_gradients_alone() -> None:
    params, state = params_like("row-major", "scalar"), BucketState()
    storage = storage_of(params)
    for p in params:
        p.grad = gradient_like(p)
    before = [p.grad.clone() for p in params]
    storage.pack_one(0, 0.5, state)
    storage.pack_rest(0.5, state)
    assert all(torch.equal(p.grad, b) for p, b in zip(params, before, strict=True))


# --- missing gradients


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_missing_gradient(layout: str, scale: float, one_by_one: bool, elsewhere: bool) -> None:
    """It counts as zero, and stays missing if every rank sends the same negative zeros."""
    params, state = params_like(layout, layout, layout), BucketState()
    storage = storage_of(params)
    for i in (0, 2):
        params[i].grad = gradient_like(params[i])
    if one_by_one:
        storage.pack_one(1, scale, state)
    storage.pack_rest(scale, state)
    assert state.absent == {1}
    assert torch.equal(storage.views[1], torch.zeros_like(params[1]))
    other = torch.zeros_like(storage.views[1]) if elsewhere else storage.views[1].clone()
    if other.is_complex():  # as collectives sum them
        torch.view_as_real(storage.views[1]).add_(torch.view_as_real(other))
    else:
        storage.views[1].add_(other)
    positions = storage.unpack(storage.flat, (), state)
    empty = params[1].numel() == 0  # has no bits to tell by
    assert (params[1].grad is not None) == (elsewhere and not empty)
    assert list(positions) == ([0, 1, 2] if elsewhere and not empty else [0, 2])
    assert state.lent == ({1} if elsewhere and not empty else set())
    if params[1].grad is not None:
        assert torch.equal(params[1].grad, torch.zeros_like(params[1]))


def test_a_gradient_of_negative_zeros_is_one() -> None:
    params, state = params_like("row-major", "scalar"), BucketState()
    storage = storage_of(params)
    params[0].grad = torch.full((3, 4), -0.0)
    storage.pack_rest(1.0, state)
    assert state.absent == {1}
    assert list(storage.unpack(storage.flat, (), state)) == [0]
    assert bits(params[0].grad) == bits(torch.full((3, 4), -0.0))


@pytest.mark.parametrize("as_views", [False, True])
def test_what_is_to_be_kept(as_views: bool) -> None:
    params, state = params_like("row-major", "row-major", "row-major"), BucketState()
    storage = storage_of(params, as_views)
    params[0].grad = torch.ones(3, 4)
    storage.pack_rest(1.0, state)
    storage.flat.fill_(5)
    assert list(storage.unpack(storage.flat, {1}, state)) == [0, 2]
    assert params[1].grad is None
    assert torch.equal(params[0].grad, torch.full((3, 4), 5.0))
    assert state.lent == {1, 2}


# --- unpacking


@pytest.mark.parametrize("layout", sorted(KEPT))
def test_new_gradients_are_laid_out_as_the_parameters(layout: str) -> None:
    for as_views in (False, True):
        params = params_like(layout)
        storage = storage_of(params, as_views)
        storage.flat.normal_()
        storage.unpack(storage.flat, (), BucketState())
        assert params[0].grad.stride() == params[0].stride()
        assert torch.equal(params[0].grad, storage.views[0])
        assert not params[0].grad.requires_grad


@pytest.mark.parametrize("as_views", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_a_comm_hook_made_of_it(as_views: bool, dtype: torch.dtype) -> None:
    """Another tensor, of another shape or dtype."""
    params, state = params_like("channels_last", "scalar"), BucketState()
    storage = storage_of(params, as_views)
    for p in params:
        p.grad = gradient_like(p)
    storage.pack_rest(1.0, state)
    made = torch.randn(1, storage.flat.numel()).to(dtype)
    storage.unpack(made, (), state)
    for param, want in zip(params, gradient_views(made.reshape(-1), storage.spec, params), strict=True):
        assert param.grad.dtype is torch.float32
        assert torch.equal(param.grad, want.float())
    assert all((p.grad is v) == as_views for p, v in zip(params, storage.views, strict=True))


@pytest.mark.parametrize("count", [0, 12, 14])
def test_a_result_of_another_size(count: int) -> None:
    storage = storage_of(params_like("row-major", "scalar"))
    with pytest.raises(ValueError, match=rf"returned {count} elements for a bucket of 13 .* \[\(3, 4\), \(\)\]"):
        storage.unpack(torch.zeros(count), (), BucketState())


@pytest.mark.parametrize("as_views", [False, True])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_gradients_with_a_graph(as_views: bool, one_by_one: bool) -> None:
    """`create_graph`: the tensor stays the same one, gets new data, and leads back into its graph."""
    params, state = params_like("row-major", "row-major"), BucketState()
    storage = storage_of(params, as_views)
    params[0].pow(3).sum().backward(create_graph=True)
    params[1].grad = torch.ones(3, 4)
    held, local = params[0].grad, params[0].grad.detach().clone()
    if one_by_one:
        storage.pack_one(0, 0.5, state)
    storage.pack_rest(0.5, state)
    assert params[0].grad is held
    storage.flat.add_(1)
    storage.unpack(storage.flat, (), state)
    assert params[0].grad is held
    assert held.requires_grad
    assert torch.equal(held.detach(), local / 2 + 1)
    storage.flat.zero_()
    assert torch.equal(held.detach(), local / 2 + 1)  # no view
    (second,) = torch.autograd.grad(held.sum(), params[0])
    torch.testing.assert_close(second, 6 * params[0].detach())


# --- gradients in a context of distributed autograd


def test_gradients_of_a_context() -> None:
    params, state = params_like("row-major", "scalar"), BucketState()
    storage = storage_of(params, as_views=True)
    params[0].grad = torch.full((3, 4), 9.0)
    context = {p: gradient_like(p) for p in params}
    want = [context[p] / 2 * 3 for p in params]
    storage.pack_rest(0.5, state, context)
    storage.flat.mul_(3)
    assert tuple(storage.unpack(storage.flat, (), state, context)) == ()
    assert all(torch.equal(context[p], w) for p, w in zip(params, want, strict=True))
    assert torch.equal(params[0].grad, torch.full((3, 4), 9.0))
    assert params[1].grad is None


def test_a_context_without_a_gradient_that_others_have() -> None:
    params, state = params_like("row-major", "scalar"), BucketState()
    storage = storage_of(params)
    context = {params[0]: torch.ones(3, 4)}
    storage.pack_rest(1.0, state, context)
    storage.unpack(storage.flat, (), state, context)  # no rank has one
    storage.flat.fill_(2)
    with pytest.raises(ReductionError, match=r"shape \(\) has a gradient on another rank and none in this rank's"):
        storage.unpack(storage.flat, (), state, context)


# --- gradients by themselves


def test_scaling_a_gradient() -> None:
    param = nn.Parameter(torch.ones(3))
    scale_gradient(param, 0.5)
    assert param.grad is None
    held = param.grad = torch.ones(3)
    scale_gradient(param, 0.5)
    assert param.grad is held
    assert held.tolist() == [0.5] * 3
    param.grad = None
    param.pow(2).sum().backward(create_graph=True)
    held = param.grad
    scale_gradient(param, 0.5)
    assert held.tolist() == [2.0] * 3
    assert param.grad.tolist() == [1.0] * 3
    assert param.grad.requires_grad


def test_local_gradients_are_those_in_grad() -> None:
    local = LocalGradients()
    param: Any = nn.Parameter(torch.ones(2))
    assert local.of(param) is None
    param.grad = torch.ones(2)
    local.scale(param, 3.0)
    assert local.of(param) is param.grad
    assert param.grad.tolist() == [3.0, 3.0]
