"""The oracle: the mean over ranks of the gradients that plain autograd leaves."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def mean_over_ranks(grad: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    """The mean over ranks; a missing gradient counts as zero; None if it is missing on every rank."""
    present = torch.tensor([float(grad is not None)], device=like.device)
    dist.all_reduce(present)
    if not present.item():
        return None
    wide = torch.complex128 if like.is_complex() else torch.float64
    total = torch.zeros_like(like, dtype=wide, memory_format=torch.contiguous_format)
    if grad is not None:
        total += (grad.to_dense() if grad.is_sparse else grad).to(wide)
    dist.all_reduce(total)
    return total / dist.get_world_size()


def local_copy(module: nn.Module) -> nn.Module:
    """A copy without hooks, with the same parameters and buffers, and copies of the gradients held so far."""
    import copy

    other = copy.deepcopy(module)
    for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
        theirs.grad = None if mine.grad is None else mine.grad.detach().clone()
    return other


def oracle(module: nn.Module, run: Callable[[nn.Module], Any]) -> dict[str, torch.Tensor | None]:
    """Runs `run` (forward and backward) on a local copy and returns the mean gradients by name.

    Gradients already held by the module count as accumulated: they are part of what is averaged.
    """
    other = local_copy(module)
    run(other)
    return {name: mean_over_ranks(p.grad, p) for name, p in other.named_parameters() if p.requires_grad}


def assert_equals_oracle(module: nn.Module, expected: dict[str, torch.Tensor | None], k: float | None = None) -> None:
    """Holds every `.grad` of the module against the oracle: max|difference| <= k max|oracle| for each tensor."""
    for name, param in module.named_parameters():
        if not param.requires_grad:
            continue
        want, have = expected[name], param.grad
        if want is None:
            assert have is None, f"{name}: no rank has a gradient, but .grad is {have}"
            continue
        assert have is not None, f"{name}: .grad is missing"
        have = have.to_dense() if have.is_sparse else have
        bound = k if k is not None else 1e-5 if param.dtype in (torch.float32, torch.complex64) else 1e-12
        worst = (have.to(want.dtype) - want).abs().max().item() if want.numel() else 0.0
        limit = bound * want.abs().max().item() if want.numel() else 0.0
        assert worst <= limit or worst == 0.0, f"{name}: differs by {worst:g}, more than {limit:g}"


def check_step(ddp: nn.Module, run: Callable[[nn.Module], Any], k: float | None = None) -> None:
    """Runs `run` on the wrapper, from no gradients, and holds what it leaves against the oracle."""
    ddp.zero_grad()
    expected = oracle(ddp.module, run)
    run(ddp)
    assert_equals_oracle(ddp.module, expected, k)


def oracle_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """One step of a copy on this rank, by the mean of the gradients."""
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    for p in model.parameters():
        mean = mean_over_ranks(p.grad, p)
        p.grad = None if mean is None else mean.to(p.dtype)
    optimizer.step()


def assert_equal_models(a: nn.Module, b: nn.Module) -> None:
    for mine, theirs in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
