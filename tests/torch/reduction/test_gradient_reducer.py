"""Which parameters are reduced when: delayed and unused ones, skipped buckets, undefined gradients."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.buckets import DoneWork
from support.models import MLP, TwoHeads
from support.oracle import assert_equals_oracle, check_step, oracle
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

from unified_ddp.errors import ReductionError, UnusedParameterError
from unified_ddp.torch import DistributedDataParallel
from unified_ddp.torch.reduction.transport import ProcessGroupTransport


def backward(module: nn.Module, x: torch.Tensor) -> None:
    module(x).pow(2).mean().backward()


def case_delayed(rank: int, world_size: int, every: bool) -> None:
    model = MLP()
    named = [(n, p) for n, p in model.named_parameters() if every or n.startswith("layers.0")]
    ddp = DistributedDataParallel(
        model, delay_all_reduce_named_params=named, param_to_hook_all_reduce=model.head.weight, bucket_cap_mb=0.0005
    )
    assert {ddp.plan.params[i].name for i in ddp.plan.buckets[-1].params} == {n for n, _ in named}
    for module in (ddp, ddp, copy.deepcopy(ddp)):
        x = torch.randn(5, 8)
        module.zero_grad()
        expected = oracle(module.module, lambda m, x=x: [backward(m, x), backward(m, 2 * x)])
        with module.no_sync():
            backward(module, x)
        backward(module, 2 * x)
        assert_equals_oracle(module.module, expected)


@pytest.mark.parametrize("every", [False, True])
def test_delayed_parameters(world: Callable[[int], Any], every: bool) -> None:
    world(2).run(case_delayed, every=every)


def case_skip(rank: int, world_size: int) -> list[int]:
    ddp = DistributedDataParallel(
        TwoHeads(), find_unused_parameters=True, skip_all_reduce_unused_params=True, bucket_cap_mb=0.0001
    )
    reduced = []
    for heads in ["ll", "lr", "rl", "rr"]:
        x = torch.randn(5, 8)
        ddp.zero_grad()

        def run(m: nn.Module, x: torch.Tensor = x, mine: str = heads[rank]) -> None:
            sum(v.pow(2).sum() for v in m(x, mine).values()).backward()

        expected = oracle(ddp.module, run)
        run(ddp)
        assert_equals_oracle(ddp.module, expected)
        reduced.append(ddp.reducer.last_pass.launched)
    return reduced


def test_skipped_buckets(world: Callable[[int], Any]) -> None:
    first, second = world(2).run(case_skip)
    assert first == second
    assert first[0] < first[1]


def case_undefined(rank: int, world_size: int, options: dict[str, Any]) -> None:
    """The double backward pass of a gradient penalty reaches no bias: it has no gradient on any rank."""

    def run(m: nn.Module, x: torch.Tensor) -> None:
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
        grad.pow(2).sum().backward()

    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), **options)
    x = torch.randn(5, 8)
    expected = oracle(ddp.module, lambda m: run(m, x))
    assert expected["2.bias"] is None
    run(ddp, x)
    assert_equals_oracle(ddp.module, expected)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}], ids=str)
def test_undefined_gradients_stay_none(world: Callable[[int], Any], options: dict[str, Any]) -> None:
    world(2).run(case_undefined, options=options)


def case_used_under_no_sync(rank: int, world_size: int, mixed: bool) -> None:
    """A static graph whose synchronising passes never use one head, which a pass under no_sync used."""
    config = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if mixed else None
    ddp = DistributedDataParallel(TwoHeads(), static_graph=True, mixed_precision=config)
    x = torch.randn(5, 8)
    for _ in range(2):
        ddp.zero_grad()
        ddp(x, "l")["l"].sum().backward()

    def run(m: nn.Module) -> None:
        with m.no_sync() if isinstance(m, DistributedDataParallel) else contextlib.nullcontext():
            m(x, "r")["r"].pow(2).sum().backward()
        m(x, "l")["l"].pow(2).sum().backward()

    check_step(ddp, run, 0.03 if mixed else None)


@pytest.mark.parametrize("mixed", [False, True])
def test_gradients_from_no_sync_of_a_parameter_unused_later(world: Callable[[int], Any], mixed: bool) -> None:
    world(2).run(case_used_under_no_sync, mixed=mixed)


def case_unused_here(rank: int, world_size: int, level: str) -> str:
    before = dist.get_debug_level()
    dist.set_debug_level(getattr(dist.DebugLevel, level))
    try:
        ddp = DistributedDataParallel(TwoHeads())
        x = torch.randn(5, 8)
        ddp(x, "lr" if rank else "l")["l"].sum().backward()
        ddp.zero_grad()
        with pytest.raises(UnusedParameterError) as caught:
            ddp(x)
        return str(caught.value)
    finally:
        dist.set_debug_level(before)


@pytest.mark.parametrize("level", ["OFF", "INFO"])
def test_unused_parameters_are_told_by_rank(world: Callable[[int], Any], level: str) -> None:
    for rank, message in enumerate(world(2).run(case_unused_here, level=level)):
        for r in (rank, 1 - rank):
            assert f"Parameters which did not receive grad for rank {r}: right.weight, right.bias" in message
        assert "No rank had a gradient for: right.weight, right.bias" in message
        assert ("set the environment variable TORCH_DISTRIBUTED_DEBUG" in message) == (level == "OFF")


def case_failed_collective(rank: int, world_size: int) -> str:
    ddp = DistributedDataParallel(MLP())
    x = torch.randn(5, 8)
    check_step(ddp, lambda m: backward(m, x))
    late = DoneWork(error=RuntimeError("connection closed"))
    with (
        mock.patch.object(ProcessGroupTransport, "all_reduce", return_value=late),
        pytest.raises(ReductionError) as caught,
    ):
        backward(ddp, x)
    return str(caught.value)


def test_an_all_reduce_that_fails_is_named(world: Callable[[int], Any]) -> None:
    for rank, message in enumerate(world(2).run(case_failed_collective)):
        assert "the all-reduce of bucket 0 (head.bias, head.weight, layers.2.bias" in message
        assert f"failed on rank {rank}" in message
        assert "connection closed" in message
