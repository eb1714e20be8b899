"""Hooks on parameters whose reduced gradient is final."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import MLP, TiedEmbedding, TwoHeads
from support.oracle import assert_equals_oracle, check_step, oracle
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel.distributed import _MixedPrecision

from unified_ddp.torch import DistributedDataParallel

SMALL = {"bucket_cap_mb": 0.002}


def backward(module: nn.Module, x: torch.Tensor) -> None:
    module(x).pow(2).mean().backward()


def case_step_in_hook(rank: int, world_size: int, options: dict[str, Any], sparse: bool) -> None:
    """An optimizer step a parameter in the hook trains as one step at the end does, and frees the gradients."""
    torch.manual_seed(3)
    make = (lambda: TiedEmbedding(sparse=True)) if sparse else MLP
    ddp = DistributedDataParallel(make(), **options)
    twin = DistributedDataParallel(copy.deepcopy(ddp.module), **options)
    optimizers = {n: torch.optim.SGD([p], lr=0.1) for n, p in ddp.module.named_parameters()}
    whole = torch.optim.SGD(twin.parameters(), lr=0.1)

    def step(name: str, param: nn.Parameter) -> None:
        assert not torch.is_grad_enabled()
        optimizers[name].step()
        param.grad = None

    handle = ddp.register_post_reduction_hook(step)
    generator = torch.Generator().manual_seed(rank)
    for iteration in range(4):
        x = torch.randint(0, 20, (6,), generator=generator) if sparse else torch.randn(5, 8, generator=generator)
        whole.zero_grad()
        if iteration == 2:
            with ddp.no_sync(), twin.no_sync():
                backward(ddp, x)
                backward(twin, x)
            assert all(p.grad is not None for p in ddp.parameters())
            ddp.sync_gradients()
            twin.sync_gradients()
        else:
            backward(ddp, x)
            backward(twin, x)
        whole.step()
        assert all(p.grad is None for p in ddp.parameters())
        for mine, theirs in zip(ddp.parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine, theirs)
    handle.remove()
    if not sparse:
        check_step(
            ddp, lambda m: backward(m, torch.full((5, 8), 0.1 * rank)), 0.03 if "mixed_precision" in options else 1e-5
        )


@pytest.mark.parametrize(
    ("options", "sparse"),
    [
        ({}, False),
        (SMALL | {"gradient_as_bucket_view": True}, False),
        (SMALL | {"find_unused_parameters": True}, False),
        ({"static_graph": True}, False),
        ({"mixed_precision": _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}, False),
        ({}, True),
    ],
    ids=str,
)
def test_stepping_an_optimizer_in_it(world: Callable[[int], Any], options: dict[str, Any], sparse: bool) -> None:
    world(2).run(case_step_in_hook, options=options, sparse=sparse)


def case_who_is_called(rank: int, world_size: int, hook: bool) -> None:
    ddp = DistributedDataParallel(TwoHeads(), find_unused_parameters=True, **SMALL)
    if hook:
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    calls: list[str] = []
    body: list[str] = []
    ddp.register_post_reduction_hook(lambda name, param: calls.append(name))
    handle = ddp.register_post_reduction_hook(lambda name, _: body.append(name), ddp.module.body.parameters())
    x = torch.randn(5, 8)

    def run(m: nn.Module) -> None:
        m(x, "l")["l"].pow(2).sum().backward()

    with ddp.no_sync():
        run(ddp)
    assert not calls
    run(ddp)
    in_order = [ddp.plan.params[i].name for b in ddp.plan.buckets for i in b.params]
    assert calls == [n for n in in_order if not n.startswith("right")]
    assert body == [n for n in in_order if n.startswith("body")]
    calls.clear()
    handle.remove()
    clone = copy.deepcopy(ddp)
    run(clone)
    assert len(calls) == 4  # hooks come along
    assert len(body) == 2  # removed
    with pytest.raises(ValueError, match=r"params\[1\], of shape \(2,\), is not reduced"):
        ddp.register_post_reduction_hook(lambda *_: None, [ddp.module.body.bias, nn.Parameter(torch.ones(2))])


@pytest.mark.parametrize("hook", [False, True])
def test_which_parameters_it_is_called_for(world: Callable[[int], Any], hook: bool) -> None:
    world(2).run(case_who_is_called, hook=hook)


def case_raises(rank: int, world_size: int, view: bool, static: bool) -> None:
    ddp = DistributedDataParallel(MLP(), gradient_as_bucket_view=view, static_graph=static, **SMALL)
    calls: list[str] = []

    def bad(name: str, param: nn.Parameter) -> None:
        calls.append(name)
        if len(calls) == 2 and rank == 0:
            raise KeyError("on purpose")

    handle = ddp.register_post_reduction_hook(bad)
    x = torch.randn(5, 8)
    expected = oracle(ddp.module, lambda m: backward(m, x))
    if rank == 0:
        with pytest.raises(KeyError, match="on purpose"):
            backward(ddp, x)
        assert len(calls) == 2
    else:
        backward(ddp, x)
        assert len(calls) == len(expected)
    assert_equals_oracle(ddp.module, expected)  # everything is reduced all the same
    for _ in range(2):
        check_step(ddp, lambda m: backward(m, x))
    handle.remove()
    with ddp.no_sync():
        backward(ddp, x)
    calls.clear()
    ddp.register_post_reduction_hook(bad)
    if rank == 0:
        with pytest.raises(KeyError):
            ddp.sync_gradients()
    else:
        ddp.sync_gradients()
    check_step(ddp, lambda m: backward(m, x))


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("view", [False, True])
def test_an_exception_in_it_loses_no_gradient(world: Callable[[int], Any], view: bool, static: bool) -> None:
    world(2).run(case_raises, view=view, static=static)
