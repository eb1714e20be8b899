"""SyncBatchNorm on CPUs against BatchNorm in one process with the batches of all ranks."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

from unified_ddp.torch import DistributedDataParallel, SyncBatchNorm

SIZES = [[5, 2, 3], [1, 0, 4], [2, 2, 2]]
"""Batch sizes of each rank, step by step."""


def images(**options: Any) -> nn.Module:
    last = nn.Flatten(), nn.Linear(4 * 25, 3)
    return nn.Sequential(nn.Conv2d(2, 4, 2), nn.BatchNorm2d(4, **options), nn.ReLU(), *last)


def rows(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5, **options), nn.Tanh(), nn.Linear(5, 2))


def sequences(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Conv1d(3, 4, 2), nn.BatchNorm1d(4, **options), nn.Tanh(), nn.Flatten(), nn.Linear(20, 2))


SHAPES = {images: (2, 6, 6), rows: (6,), sequences: (3, 6)}
CASES: dict[str, tuple[Callable[..., nn.Module], dict[str, Any], torch.dtype]] = {
    "images": (images, {}, torch.float32),
    "rows": (rows, {}, torch.float32),
    "sequences": (sequences, {}, torch.float64),
    "cumulative average": (rows, {"momentum": None}, torch.float64),
    "no affine": (images, {"affine": False}, torch.float64),
    "no running statistics": (rows, {"track_running_stats": False}, torch.float64),
    "no bias": (images, {"bias": False}, torch.float64),
    "channels last": (images, {}, torch.float64),
}


def whole_batch(sizes: list[int], shape: tuple[int, ...], dtype: torch.dtype, step: int) -> list[torch.Tensor]:
    """All ranks' batches, with a mean far from 0."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(n, *shape, generator=generator, dtype=dtype) + 3 for n in sizes]


def case_training(rank: int, world_size: int, kind: str, wrapped_class: bool) -> None:
    make, options, dtype = CASES[kind]
    torch.manual_seed(1)
    plain = make(**options).to(dtype)
    if kind == "channels last":
        plain = plain.to(memory_format=torch.channels_last)
    convert = nn.SyncBatchNorm if wrapped_class else SyncBatchNorm
    ddp = DistributedDataParallel(convert.convert_sync_batchnorm(copy.deepcopy(plain)), reduction="sum")
    layer = ddp.module[1]
    assert type(layer) is SyncBatchNorm
    bound = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 1e-9, "atol": 1e-10}
    for step, sizes in enumerate(SIZES):
        batches = whole_batch(sizes, SHAPES[make], dtype, step)
        if kind == "channels last":
            batches = [b.contiguous(memory_format=torch.channels_last) for b in batches]
        whole = torch.cat(batches).requires_grad_()
        plain.zero_grad()
        out = plain(whole)
        out.pow(2).sum().backward()

        mine = batches[rank].clone().requires_grad_()
        ddp.zero_grad()
        result = ddp(mine)
        torch.testing.assert_close(result, out.split(sizes)[rank], **bound)
        result.pow(2).sum().backward()
        torch.testing.assert_close(mine.grad, whole.grad.split(sizes)[rank], **bound)
        for (name, p), q in zip(ddp.module.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, msg=lambda m, n=name: f"{n}: {m}", **bound)
        for (name, b), c in zip(ddp.module.named_buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(b, c, msg=lambda m, n=name: f"{n}: {m}", **bound)
    if layer.track_running_stats:
        ddp.eval()
        plain.eval()
        batches = whole_batch([rank + 1] * 3, SHAPES[make], dtype, 9)  # no rank waits for another
        torch.testing.assert_close(ddp(batches[rank]), plain(batches[rank]), **bound)


@pytest.mark.parametrize("kind", CASES)
def test_training_is_that_of_one_process(world: Callable[[int], Any], kind: str) -> None:
    world(3).run(case_training, kind=kind, wrapped_class=kind == "images")


def case_normalised_layout(rank: int, world_size: int) -> None:
    layer = SyncBatchNorm(4).train()
    x = torch.randn(2, 4, 3, 3).contiguous(memory_format=torch.channels_last).requires_grad_()
    y = layer(x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    y.sum().backward()
    assert x.grad.is_contiguous(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match="more than 1 value per channel when training, got 1 on all ranks"):
        layer(torch.randn(1 - rank, 4))
    with pytest.raises(ValueError, match="at least 2D"):
        layer(torch.randn(4))
    with pytest.raises(RuntimeError, match="once_differentiable"):
        torch.autograd.grad(layer(x).pow(2).sum(), x, create_graph=True)[0].sum().backward()


def test_layout_and_errors(world: Callable[[int], Any]) -> None:
    world(2).run(case_normalised_layout)


def case_low_precision(rank: int, world_size: int, how: str) -> None:
    torch.manual_seed(2)
    plain = images()
    config = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if how == "mixed" else None
    module = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    ddp = DistributedDataParallel(module, reduction="sum", mixed_precision=config)
    batches = [b - 3 + r for r, b in enumerate(whole_batch([8, 8], (2, 6, 6), torch.float32, 0))]
    plain(torch.cat(batches)).pow(2).mean().backward()
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        out = ddp(batches[rank])
    assert out.dtype is torch.bfloat16
    (out.float().pow(2).mean() / world_size).backward()
    for p, q in zip(ddp.module.parameters(), plain.parameters(), strict=True):
        # bf16 cancels in what goes through the normalisation; statistics of one rank alone are off by far more
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=0.1 * float(q.grad.abs().max()) + 1e-3)


@pytest.mark.parametrize("how", ["autocast", "mixed"])
def test_low_precision(world: Callable[[int], Any], how: str) -> None:
    world(2).run(case_low_precision, how=how)


class OwnLayer(nn.SyncBatchNorm):
    """Inherits torch's forward."""


class OwnForward(nn.SyncBatchNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input * self.weight


def case_groups_and_subclasses(rank: int, world_size: int) -> None:
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    local = SyncBatchNorm.convert_sync_batchnorm(rows(), alone)
    x = torch.randn(3, 6) + rank
    plain = rows()
    plain.load_state_dict(local.state_dict())
    torch.testing.assert_close(local(x), plain(x))
    with pytest.raises(ValueError, match="layer '1' is a OwnLayer"):
        DistributedDataParallel(nn.Sequential(nn.Linear(6, 5), OwnLayer(5)))
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(6, 5), OwnForward(5)))
    assert type(ddp.module[1]) is OwnForward
    ddp(x).sum().backward()
    trained = DistributedDataParallel(SyncBatchNorm.convert_sync_batchnorm(rows()))
    again = copy.deepcopy(trained)
    for m in (trained, again):
        m.zero_grad()
        m(x).sum().backward()
    for p, q in zip(trained.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_groups_subclasses_and_copies(world: Callable[[int], Any]) -> None:
    world(2).run(case_groups_and_subclasses)
