"""Mixed precision: what is lowered, set aside, reduced and restored."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.buckets import bucket_of
from support.models import MLP
from support.oracle import assert_equals_oracle, oracle
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

from unified_ddp.passes import BucketState
from unified_ddp.torch import DistributedDataParallel
from unified_ddp.torch.reduction.mixed_precision import MixedBucketStorage, MixedPrecision


def backward(module: nn.Module, x: torch.Tensor) -> None:
    module(x).pow(2).mean().backward()


def case_mixed(rank: int, world_size: int, dtype: str, reduce: str | None) -> None:
    low = getattr(torch, dtype)
    config = _MixedPrecision(param_dtype=low, reduce_dtype=getattr(torch, reduce) if reduce else None)
    ddp = DistributedDataParallel(MLP(), mixed_precision=config, bucket_cap_mb=0.002)
    k = 0.03 if low is torch.bfloat16 else 0.01
    for _ in range(3):
        batches = [torch.randn(5, 8) for _ in range(2)]
        ddp.zero_grad()
        expected = oracle(ddp.module, lambda m, b=batches: [backward(m, x) for x in b])
        with ddp.no_sync():
            backward(ddp, batches[0])
        assert all(p.dtype is torch.float32 and p.grad.dtype is torch.float32 for p in ddp.parameters())
        assert ddp(batches[1]).dtype is low
        with torch.no_grad():
            ddp(batches[1])
        assert all(p.dtype is torch.float32 for p in ddp.parameters())
        backward(ddp, batches[1])
        assert all(p.dtype is torch.float32 for p in ddp.parameters())
        assert_equals_oracle(ddp.module, expected, k)
    backward(copy.deepcopy(ddp), batches[0])


@pytest.mark.parametrize(("dtype", "reduce"), [("float16", None), ("bfloat16", None), ("float16", "float32")])
def test_mixed_precision(world: Callable[[int], Any], dtype: str, reduce: str | None) -> None:
    world(2).run(case_mixed, dtype=dtype, reduce=reduce)


def case_evaluates_and_copies(rank: int, world_size: int) -> None:
    config = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ddp = DistributedDataParallel(MLP(), mixed_precision=config)
    x = torch.randn(5, 8)
    backward(ddp, x)
    other = copy.deepcopy(ddp)
    ddp.eval()
    with torch.no_grad():
        assert ddp(x).dtype == torch.bfloat16
    ddp.train()
    for module in (ddp, other):
        assert all(p.dtype == torch.float32 for p in module.parameters())
        module.zero_grad()
        with module.no_sync():
            backward(module, x)
        backward(module, x)
        assert all(p.dtype == torch.float32 and p.grad.dtype == torch.float32 for p in module.parameters())
    for mine, theirs in zip(ddp.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
        everybodys = [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_gather(everybodys, mine.grad)
        assert torch.equal(everybodys[0], everybodys[1])


def test_mixed_precision_evaluates_accumulates_and_copies(world: Callable[[int], Any]) -> None:
    world(2).run(case_evaluates_and_copies)


# --- without ranks

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def mixed_of(*params: nn.Parameter, buffers: tuple = (), **config: Any) -> MixedPrecision:
    return MixedPrecision(_MixedPrecision(**{"param_dtype": BF16, **config}), params, buffers)


def param_of(values: list[float], dtype: torch.dtype = F32) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=dtype))


FINE = [1.0 + 2.0**-12, -3.0]
"""bfloat16 does not hold the first one."""


def test_lowering_and_restoring() -> None:
    param, double = param_of(FINE), param_of(FINE, F64)
    index = nn.Parameter(torch.tensor([1, 2]), requires_grad=False)
    mixed = mixed_of(param, double, index)
    full = [param.data, double.data]
    for _ in range(2):
        mixed.lower()
        mixed.lower()  # a second forward
        assert (param.dtype, double.dtype, index.dtype) == (BF16, BF16, torch.int64)
        assert param.tolist() == [1.0, -3.0]
        mixed.restore()
        mixed.restore()
        assert [param.dtype, double.dtype] == [F32, F64]
        assert [p.data_ptr() for p in (param, double)] == [t.data_ptr() for t in full]
    assert param.tolist() == FINE
    assert param._mp_param.numel() == 0  # freed


def test_without_a_param_dtype_nothing_is_lowered() -> None:
    param = param_of(FINE)
    mixed = mixed_of(param, param_dtype=None, reduce_dtype=F16)
    param.grad = torch.ones(2)
    mixed.lower()
    assert param.dtype is F32
    assert mixed.gradient(param) is param.grad
    assert mixed.storage_dtype(param) is F16


def test_buffers_are_cast_for_good() -> None:
    buffers = (torch.ones(2), torch.tensor([1]))
    mixed_of(param_of(FINE), buffers=buffers, buffer_dtype=F16)
    assert [b.dtype for b in buffers] == [F16, torch.int64]
    mixed_of(param_of(FINE), buffers=buffers[1:])
    assert buffers[1].dtype is torch.int64


@pytest.mark.parametrize(
    ("param_dtype", "reduce_dtype", "own", "found"),
    [
        (BF16, None, F32, BF16),
        (BF16, F32, F32, F32),
        (None, F16, F32, F16),
        (None, None, F32, F32),
        (None, None, F64, F64),
        (BF16, F32, torch.complex64, torch.complex64),
    ],
)
def test_the_dtype_of_the_reduction(
    param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None, own: torch.dtype, found: torch.dtype
) -> None:
    param = nn.Parameter(torch.zeros(2, dtype=own))
    assert mixed_of(param, param_dtype=param_dtype, reduce_dtype=reduce_dtype).storage_dtype(param) is found


def test_inputs_are_cast() -> None:
    mixed = mixed_of(param_of(FINE))
    (x, text), kwargs = mixed.cast_inputs((torch.ones(2), "text"), {"y": [torch.ones(1)], "i": torch.tensor([1])})
    assert (x.dtype, text) == (BF16, "text")
    assert (kwargs["y"][0].dtype, kwargs["i"].dtype) == (BF16, torch.int64)


def lowered_with_gradients(reduce_dtype: torch.dtype | None) -> tuple[MixedPrecision, list[nn.Parameter]]:
    """Gradients: set aside and new, set aside only, new only, none."""
    params = [param_of(FINE) for _ in range(4)]
    mixed = mixed_of(*params, reduce_dtype=reduce_dtype)
    for p in params[:2]:
        p.grad = torch.tensor(FINE)
    mixed.lower()
    assert all(p.grad is None for p in params)
    for p in params[0], params[2]:
        p.grad = torch.tensor([0.5, 0.25], dtype=BF16)
    return mixed, params


WHOLE = [[FINE[0] + 0.5, FINE[1] + 0.25], FINE, [0.5, 0.25], None]


def test_what_was_set_aside_is_not_rounded() -> None:
    mixed, params = lowered_with_gradients(None)
    assert [None if (g := mixed.gradient(p)) is None else g.tolist() for p in params] == WHOLE
    mixed.restore()
    assert [None if p.grad is None else p.grad.tolist() for p in params] == WHOLE
    assert all(p.grad.dtype is F32 for p in params[:3])


def test_both_parts_are_scaled() -> None:
    mixed, params = lowered_with_gradients(None)
    for p in params:
        mixed.scale_gradient(p, 0.5)
    found = [mixed.gradient(p) for p in params]
    assert [None if g is None else (2 * g).tolist() for g in found] == WHOLE


@pytest.mark.parametrize("reduce_dtype", [F32, BF16])
def test_a_bucket(reduce_dtype: torch.dtype) -> None:
    mixed, params = lowered_with_gradients(reduce_dtype)
    storage, state = MixedBucketStorage(bucket_of(params), params, mixed), BucketState()
    assert storage.flat.dtype is reduce_dtype
    storage.pack_one(0, 0.5, state)
    storage.pack_rest(0.5, state)
    want = [torch.tensor(w or [0.0, 0.0]).to(reduce_dtype) / 2 for w in WHOLE]
    assert all(map(torch.equal, storage.views, want))
    assert state.absent == {3}
    assert storage.unpack(storage.flat, {1}, state) == [0, 2]
    assert [p.dtype for p in params] == [F32] * 4
    assert torch.equal(params[0].grad, want[0].float())
    assert torch.equal(params[2].grad, want[2].float())
    assert params[1].grad.tolist() == FINE  # what was kept
    assert params[3].grad is None
    storage.flat.zero_()
    assert torch.equal(params[0].grad, want[0].float())  # no view


def test_a_bucket_whose_hook_returns_another_size() -> None:
    mixed, params = lowered_with_gradients(F32)
    storage = MixedBucketStorage(bucket_of(params), params, mixed)
    with pytest.raises(ValueError, match="returned 3 elements for a bucket of 8"):
        storage.unpack(torch.zeros(3), (), BucketState())
