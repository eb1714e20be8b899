"""`reduction=`: the sum over ranks, and the mean weighted by rank."""

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ids import named
from support.models import MLP, Mixed, TiedEmbedding, TwoHeads
from support.oracle import assert_equals_oracle, local_copy, mean_over_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel.distributed import _MixedPrecision

from unified_ddp.errors import ReductionError
from unified_ddp.torch import DistributedDataParallel

Run = Callable[[nn.Module], Any]
SMALL = {"bucket_cap_mb": 0.0005}
BF16 = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
OPTIONS: list[dict[str, Any]] = [
    {},
    SMALL | {"gradient_as_bucket_view": True},
    SMALL | {"find_unused_parameters": True},
    {"static_graph": True},
    {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
    {"mixed_precision": BF16},
]


def backward(module: nn.Module, x: torch.Tensor) -> None:
    (module(x).abs() ** 2).float().mean().backward()


def expected(module: nn.Module, run: Run, share: float) -> dict[str, torch.Tensor | None]:
    """What is reduced already, plus the sum over ranks of share times the gradient that `run` leaves by itself."""
    held = {n: None if p.grad is None else p.grad.detach().clone() for n, p in module.named_parameters()}
    other = local_copy(module)
    other.zero_grad()
    run(other)
    found = {}
    for name, p in other.named_parameters():
        mine = p.grad if p.grad is None or share else torch.zeros_like(p)
        total = mean_over_ranks(None if mine is None else mine * (share * dist.get_world_size()), p)
        before = held[name]
        found[name] = total if before is None else before.to_dense() + (0 if total is None else total)
    return found


def check(ddp: DistributedDataParallel, run: Run, share: float, k: float | None = None) -> None:
    want = expected(ddp.module, run, share)
    run(ddp)
    assert_equals_oracle(ddp.module, want, k)


def accumulate(m: nn.Module, batches: Sequence[torch.Tensor]) -> None:
    """All microbatches but the last under no_sync."""
    for i, x in enumerate(batches):
        if isinstance(m, DistributedDataParallel):
            with m.no_sync(enabled=i < len(batches) - 1):
                backward(m, x)
        else:
            backward(m, x)


def accumulate_apart(m: nn.Module, batches: Sequence[torch.Tensor]) -> None:
    for x in batches:
        backward(getattr(m, "module", m), x)
    if isinstance(m, DistributedDataParallel):
        m.sync_gradients()


def twice(m: nn.Module, batches: Sequence[torch.Tensor]) -> None:
    out = (m(batches[0]).abs() ** 2).float().mean()
    out.backward(retain_graph=True)
    out.backward()


def case_programs(
    rank: int, world_size: int, reduction: str, options: dict[str, Any], make: Callable[[], nn.Module], hook: bool
) -> None:
    ddp = DistributedDataParallel(make(), reduction=reduction, **options)
    if hook:
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    k = 0.04 if "mixed_precision" in options else 1e-5
    for step, program in enumerate([accumulate, accumulate, accumulate_apart, twice, accumulate]):
        weights = [float(1 + r * step) for r in range(world_size)]
        share = 1.0
        if reduction == "weighted_mean":
            ddp.set_weight(weights[rank])
            share = weights[rank] / sum(weights)
        tokens = isinstance(ddp.module, TiedEmbedding)
        batches = [torch.randint(0, 20, (6,)) if tokens else torch.randn(5, 8) for _ in range(3)]
        if step % 2 == 0:  # else what was reduced before stays, and counts once
            ddp.zero_grad(set_to_none=step == 0)
        check(ddp, lambda m, p=program, b=batches: p(m, b), share, k)


@pytest.mark.parametrize("reduction", ["sum", "weighted_mean"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(world: Callable[[int], Any], reduction: str, options: dict[str, Any]) -> None:
    world(2).run(case_programs, reduction=reduction, options=options, make=MLP, hook=False)


def sparse() -> nn.Module:
    return TiedEmbedding(sparse=True)


@pytest.mark.parametrize("reduction", ["sum", "weighted_mean"])
@pytest.mark.parametrize(("make", "hook"), [(Mixed, False), (sparse, False), (MLP, True)], ids=named)
def test_models_and_comm_hooks(
    world: Callable[[int], Any], reduction: str, make: Callable[[], nn.Module], hook: bool
) -> None:
    world(3).run(case_programs, reduction=reduction, options=dict(SMALL), make=make, hook=hook)


def case_unused(rank: int, world_size: int, options: dict[str, Any]) -> None:
    """Heads that are used on one rank, on none, or later; what is left unused keeps what it has."""
    ddp = DistributedDataParallel(TwoHeads(), reduction="sum", find_unused_parameters=True, **options)
    for heads in ["lr", "ll", "rl"]:
        x = torch.randn(5, 8)

        def run(m: nn.Module, x: torch.Tensor = x, head: str = heads[rank]) -> None:
            m(x, head)[head].pow(2).sum().backward()

        check(ddp, run, 1.0)


@pytest.mark.parametrize("options", [{}, SMALL | {"gradient_as_bucket_view": True}], ids=str)
def test_sum_of_unused_parameters(world: Callable[[int], Any], options: dict[str, Any]) -> None:
    world(2).run(case_unused, options=options)


def case_sum_details(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(MLP(), reduction="sum")
    x = torch.randn(5, 8)
    check(ddp, lambda m: backward(m, x), 1.0)
    before = [p.grad.clone() for p in ddp.parameters()]
    torch.autograd.grad(ddp(x).sum(), list(ddp.parameters()))  # leaves every .grad alone
    torch.autograd.grad(ddp.module(x).sum(), list(ddp.parameters()))
    assert all(torch.equal(a, p.grad) for a, p in zip(before, ddp.parameters(), strict=True))
    for p in ddp.parameters():
        p.grad.mul_(0.5)  # what clipping does
    check(ddp, lambda m: backward(m, x), 1.0)

    def graph(m: nn.Module) -> None:
        m(x).pow(2).sum().backward(create_graph=True)

    ddp.zero_grad()
    for _ in range(3):
        check(ddp, graph, 1.0)
    other = copy.deepcopy(ddp)
    other.zero_grad()
    check(other, lambda m: backward(m, x), 1.0)
    gone = weakref.ref(other.reducer)
    gc.collect()
    gc.disable()
    try:
        del other
        assert gone() is None  # without the collector's help
    finally:
        gc.enable()


def test_sum_on_top_of_gradients(world: Callable[[int], Any]) -> None:
    world(2).run(case_sum_details)


def case_zero_weight(rank: int, world_size: int, options: dict[str, Any], tokens: bool) -> None:
    """A rank without tokens has a loss of 0 / 0: its gradients are NaN and count for nothing."""
    ddp = DistributedDataParallel(sparse() if tokens else MLP(600, 2), reduction="weighted_mean", **options)
    for weights in ([3, 0, 1], [0, 0, 2]):
        ddp.zero_grad()
        x = torch.randint(0, 20, (6,)) if tokens else torch.randn(5, 8)
        ddp.set_weight(torch.tensor(weights[rank]))

        def run(m: nn.Module, x: torch.Tensor = x, bad: bool = not weights[rank]) -> None:
            (m(x).pow(2).mean() * (float("nan") if bad else 1.0)).backward()

        check(ddp, run, weights[rank] / sum(weights))


@pytest.mark.parametrize(
    ("options", "tokens"), [({}, False), (SMALL | {"gradient_as_bucket_view": True}, False), ({}, True)], ids=str
)
def test_a_weight_of_zero(world: Callable[[int], Any], options: dict[str, Any], tokens: bool) -> None:
    world(3).run(case_zero_weight, options=options, tokens=tokens)


def case_token_mean(rank: int, world_size: int) -> None:
    """Uneven tokens in uneven microbatches: the gradient of the mean over all tokens of all ranks."""
    ddp = DistributedDataParallel(MLP(), reduction="weighted_mean")
    generator = torch.Generator().manual_seed(5)
    sizes = [[3, 1], [7, 2]]
    data = [[torch.randn(n, 8, generator=generator) for n in row] for row in sizes]
    whole = copy.deepcopy(ddp.module)
    whole(torch.cat([x for row in data for x in row])).pow(2).sum(1).mean().backward()
    mine = sum(sizes[rank])
    ddp.set_weight(mine)
    for i, x in enumerate(data[rank]):
        with ddp.no_sync(enabled=i == 0):
            (ddp(x).pow(2).sum(1).sum() / mine).backward()
    for p, q in zip(ddp.module.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_mean_over_tokens(world: Callable[[int], Any]) -> None:
    world(2).run(case_token_mean)


def case_weight_errors(rank: int, world_size: int, options: dict[str, Any]) -> list[str]:
    ddp = DistributedDataParallel(MLP(), reduction="weighted_mean", **options)
    x = torch.randn(5, 8)
    messages = []
    for weights in ([1.0, None, None], [0, 0, 0]):
        ddp.zero_grad()
        if weights[rank] is not None:
            ddp.set_weight(weights[rank])
        with pytest.raises(ReductionError) as caught:
            backward(ddp, x)
        messages.append(str(caught.value))
    ddp.zero_grad()
    ddp.set_weight(rank + 1)
    check(ddp, lambda m: backward(m, x), (rank + 1) / 6)
    return messages


@pytest.mark.parametrize("options", [{}, SMALL | {"gradient_as_bucket_view": True}], ids=str)
def test_weights_that_cannot_be(world: Callable[[int], Any], options: dict[str, Any]) -> None:
    for missing, zero in world(3).run(case_weight_errors, options=options):
        assert "no weight was set for this iteration on ranks 1, 2" in missing
        assert "the weights of all ranks are 0" in zero


def case_weight_lasts_an_iteration(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(MLP(), reduction="weighted_mean")
    x = torch.randn(5, 8)
    share = (rank + 1) / 3
    out = ddp(x).pow(2).sum()
    ddp.set_weight(rank + 1)  # after the forward
    out.backward(retain_graph=True)
    out.backward()  # the same iteration
    other = copy.deepcopy(ddp.module)
    other.zero_grad()
    (2 * other(x).pow(2).sum()).backward()
    for p, q in zip(ddp.module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, (mean_over_ranks(q.grad * share, q) * 2).float())
    with pytest.raises(ReductionError, match="on ranks 0, 1"):
        backward(ddp, x)  # the next one


def test_a_weight_lasts_one_iteration(world: Callable[[int], Any]) -> None:
    world(2).run(case_weight_lasts_an_iteration)


def case_join(rank: int, world_size: int, reduction: str) -> None:
    ddp = DistributedDataParallel(MLP(), reduction=reduction, **SMALL)
    generator = torch.Generator().manual_seed(7)
    data = torch.randn(4, world_size, 3, 8, generator=generator)
    with ddp.join():
        for step in range(2 + 2 * rank):
            active = range(world_size) if step < 2 else [1]
            weights = {r: float(1 + r + step) for r in active}
            want: dict[str, Any] = {}
            for r in active:
                other = copy.deepcopy(ddp.module)
                other.zero_grad()
                backward(other, data[step, r])
                share = 1.0 if reduction == "sum" else weights[r] / sum(weights.values())
                for name, p in other.named_parameters():
                    want[name] = want.get(name, 0) + p.grad * share
            ddp.zero_grad()
            if reduction == "weighted_mean":
                ddp.set_weight(weights[rank])
            backward(ddp, data[step, rank])
            for name, p in ddp.module.named_parameters():
                torch.testing.assert_close(p.grad, want[name])


@pytest.mark.parametrize("reduction", ["sum", "weighted_mean"])
def test_join(world: Callable[[int], Any], reduction: str) -> None:
    world(2).run(case_join, reduction=reduction)


CHANGES: dict[str, Callable[[MLP], None]] = {
    "unfrozen": lambda m: m.layers[0].requires_grad_(True) and None,
    "assigned": lambda m: (
        m.load_state_dict({n: nn.Parameter(t.clone()) for n, t in m.state_dict().items()}, assign=True) and None
    ),
}


def case_changed(rank: int, world_size: int, reduction: str, change: str) -> None:
    model = MLP()
    model.layers[0].requires_grad_(False)
    ddp = DistributedDataParallel(model, reduction=reduction)
    share = 1.0 if reduction == "sum" else 1 / world_size
    check(ddp, lambda m: backward(m, torch.ones(3, 8)), share)
    CHANGES[change](model)
    ddp.zero_grad()
    batches = [torch.randn(3, 8) for _ in range(3)]
    check(ddp, lambda m: accumulate(m, batches), share)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_what_was_accumulated_before_a_change_is_followed(
    world: Callable[[int], Any], reduction: str, change: str
) -> None:
    world(2).run(case_changed, reduction=reduction, change=change)


def case_hook_raises(rank: int, world_size: int) -> None:
    """A user's hook raises after ours divided what `.grad` held: it is divided once, not again in the next pass."""
    ddp = DistributedDataParallel(MLP(), reduction="sum")
    x = torch.randn(3, 8)
    backward(ddp, x)

    def fail(_grad: torch.Tensor) -> None:
        raise ZeroDivisionError

    want = expected(ddp.module, lambda m: backward(m, 2 * x), 1.0)
    handle = ddp.module.head.bias.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        backward(ddp, x)
    handle.remove()
    backward(ddp, 2 * x)
    name, found = "head.bias", ddp.module.head.bias.grad
    torch.testing.assert_close(found.double(), want[name])


def test_sum_after_an_exception_in_a_hook(world: Callable[[int], Any]) -> None:
    world(2).run(case_hook_raises)
