"""Features around the reduction: uneven inputs, mixed precision, delayed and skipped parameters, logging data."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import MLP, TwoHeads
from support.oracle import assert_equals_oracle, check_step, mean_over_ranks, oracle
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

from unified_ddp.torch import DistributedDataParallel


def backward(module: nn.Module, x: torch.Tensor) -> None:
    module(x).pow(2).mean().backward()


def case_join(rank: int, world_size: int, initial: bool, options: dict[str, Any]) -> None:
    ddp = DistributedDataParallel(MLP(), **options)
    steps = 2 + 2 * rank
    for epoch in range(2):
        with ddp.join(divide_by_initial_world_size=initial):
            for step in range(steps):
                active = world_size if step < 2 else world_size - 1
                data = [torch.full((3, 8), 0.1 * (1 + r + step + epoch)) for r in range(world_size)]
                expected: dict[str, torch.Tensor] = {}
                for r in range(world_size - active, world_size):
                    other = copy.deepcopy(ddp.module)
                    backward(other, data[r])
                    for name, p in other.named_parameters():
                        assert p.grad is not None
                        expected[name] = expected.get(name, 0) + p.grad / (world_size if initial else active)
                ddp.zero_grad()
                backward(ddp, data[rank])
                for name, p in ddp.module.named_parameters():
                    torch.testing.assert_close(p.grad, expected[name])
        check_step(ddp, lambda m: backward(m, torch.ones(3, 8) * rank))  # outside the context again
    for p in ddp.parameters():
        every = [torch.empty_like(p) for _ in range(world_size)]
        dist.all_gather(every, p.detach())
        assert torch.equal(every[0], every[1])


@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"bucket_cap_mb": 0.0005, "find_unused_parameters": True}, {"static_graph": True}], ids=str
)
def test_join(world: Callable[[int], Any], initial: bool, options: dict[str, Any]) -> None:
    world(2).run(case_join, initial=initial, options=options)


def case_join_throws(rank: int, world_size: int) -> str:
    ddp = DistributedDataParallel(MLP())

    def train() -> None:
        with ddp.join(throw_on_early_termination=True):
            for _ in range(2 + rank):
                backward(ddp, torch.randn(3, 8))

    with pytest.raises(RuntimeError) as caught:
        train()
    return str(caught.value)


def test_join_can_throw(world: Callable[[int], Any]) -> None:
    for message in world(2).run(case_join_throws):
        assert "exhausted" in message


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


def case_logging(rank: int, world_size: int) -> dict[str, Any]:
    ddp = DistributedDataParallel(MLP())
    for _ in range(3):
        backward(ddp, torch.randn(5, 8))
    return ddp._get_ddp_logging_data()


def test_logging_data(world: Callable[[int], Any]) -> None:
    for rank, data in enumerate(world(2).run(case_logging)):
        assert data["rank"] == rank
        assert data["world_size"] == 2
        assert data["iteration"] == 2
        assert data["num_buckets_reduced"] == 1
        assert data["can_set_static_graph"] == 1
        assert data["avg_backward_comm_time"] > 0


def case_helper(rank: int, world_size: int) -> None:
    like = torch.zeros(3)
    assert mean_over_ranks(None, like) is None
    mean = mean_over_ranks(torch.ones(3) if rank else None, like)
    assert mean is not None
    assert mean.tolist() == [0.5, 0.5, 0.5]


def test_the_oracle_counts_missing_gradients_as_zero(world: Callable[[int], Any]) -> None:
    world(2).run(case_helper)
