"""Reducing what was accumulated without another forward or backward pass, and `no_sync` as an option of one loop."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import MLP, Mixed, TiedEmbedding, TwoHeads
from support.oracle import assert_equals_oracle, check_step, mean_over_ranks, oracle
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel.distributed import _MixedPrecision

from unified_ddp.errors import MisuseError
from unified_ddp.torch import DistributedDataParallel

SMALL = {"bucket_cap_mb": 0.0005}
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "mlp": (MLP, lambda: torch.randn(5, 8)),
    "mixed dtypes": (Mixed, lambda: torch.randn(5, 8)),
    "sparse": (lambda: TiedEmbedding(sparse=True), lambda: torch.randint(0, 20, (6,))),
    "two heads": (TwoHeads, lambda: torch.randn(5, 8)),
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("mlp", {}),
    ("mlp", SMALL | {"gradient_as_bucket_view": True}),
    ("mlp", {"static_graph": True}),
    ("mlp", {"skip_all_reduce_unused_params": True}),
    ("mlp", {"mixed_precision": _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}),
    ("mixed dtypes", SMALL),
    ("sparse", {"find_unused_parameters": True}),
    ("two heads", {}),
    ("two heads", SMALL | {"find_unused_parameters": True}),
    ("two heads", {"find_unused_parameters": True, "gradient_as_bucket_view": True}),
]


def loss(module: nn.Module, x: torch.Tensor, rank: int) -> torch.Tensor:
    out = module(x, "lr"[rank]) if isinstance(getattr(module, "module", module), TwoHeads) else module(x)
    parts = out.values() if isinstance(out, dict) else [out]
    return sum((p.abs().float() ** 2).mean() for p in parts)  # type: ignore[return-value]


def case_sync(rank: int, world_size: int, model: str, options: dict[str, Any], hook: bool) -> None:
    make, data = MODELS[model]
    module = make()
    if isinstance(module, TwoHeads):
        module.never = nn.Linear(2, 2)  # no rank uses it: its gradient stays None
    ddp = DistributedDataParallel(module, **options)
    if hook:
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    k = 0.03 if "mixed_precision" in options else None
    used_alike = options.get("find_unused_parameters", False) or model != "two heads"
    for step in range(3):
        batches = [data() for _ in range(2)]

        def run(m: nn.Module, batches: list[torch.Tensor] = batches) -> None:
            for x in batches:
                loss(m, x, rank).backward()

        ddp.zero_grad()
        expected = oracle(ddp.module, run)
        if step == 1:
            run(ddp.module)
        else:
            with ddp.no_sync():
                run(ddp)
        ddp.sync_gradients()
        assert_equals_oracle(ddp.module, expected, k)
        ddp.sync_gradients()  # equal values stay as they are
        assert_equals_oracle(ddp.module, expected, k)
        if used_alike:  # accumulates on top of what was reduced, in a synchronising pass of its own
            expected = oracle(ddp.module, run)
            with ddp.no_sync():
                loss(ddp, batches[0], rank).backward()
            loss(ddp, batches[1], rank).backward()
            assert_equals_oracle(ddp.module, expected, k)


@pytest.mark.parametrize(("model", "options"), CASES, ids=str)
def test_accumulated_gradients_are_reduced(world: Callable[[int], Any], model: str, options: dict[str, Any]) -> None:
    world(2).run(case_sync, model=model, options=options, hook=False)


@pytest.mark.parametrize("view", [False, True])
def test_comm_hooks_reduce_them(world: Callable[[int], Any], view: bool) -> None:
    world(2).run(case_sync, model="mlp", options=SMALL | {"gradient_as_bucket_view": view}, hook=True)


def case_by_hand(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(MLP())
    ddp.sync_gradients()
    assert all(p.grad is None for p in ddp.parameters())
    for p in ddp.parameters():
        p.grad = torch.full_like(p, float(rank)) if p.dim() > 1 or rank else None
    expected = {n: mean_over_ranks(p.grad, p) for n, p in ddp.module.named_parameters()}
    ddp.sync_gradients()
    assert_equals_oracle(ddp.module, expected)


def test_gradients_assigned_by_hand(world: Callable[[int], Any]) -> None:
    world(3).run(case_by_hand)


def case_refused(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(MLP())
    x = torch.randn(5, 8)
    handle = ddp.module.head.weight.register_post_accumulate_grad_hook(lambda _: ddp.sync_gradients())
    for context in (ddp.no_sync(enabled=False), ddp.no_sync()):
        with context, pytest.raises(MisuseError, match="during a backward pass"):
            ddp(x).sum().backward()
    handle.remove()
    with ddp.join(), pytest.raises(MisuseError, match="inside `join`"):
        ddp.sync_gradients()
    ddp.sync_gradients()  # what the interrupted backward passes left
    check_step(ddp, lambda m: m(x).sum().backward())


def test_where_it_cannot_be_called(world: Callable[[int], Any]) -> None:
    world(2).run(case_refused)


def case_changed(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(MLP())
    ddp.module.load_state_dict({n: nn.Parameter(t.clone()) for n, t in ddp.module.state_dict().items()}, assign=True)
    x = torch.randn(3, 8)
    expected = oracle(ddp.module, lambda m: m(x).pow(2).mean().backward())
    with ddp.no_sync():
        ddp(x).pow(2).mean().backward()
    ddp.sync_gradients()
    assert_equals_oracle(ddp.module, expected)


def test_a_module_changed_before(world: Callable[[int], Any]) -> None:
    world(2).run(case_changed)


class TwoMethods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = MLP()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.net(x))

    def loss(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return scale * self.forward(x).pow(2).mean() + self.net(x).abs().mean()


def case_call_method(rank: int, world_size: int, options: dict[str, Any]) -> None:
    ddp = DistributedDataParallel(TwoMethods(), **options)
    for step in range(4):
        x = torch.randn(6, 8) * (rank + 1)

        def run(m: nn.Module, x: torch.Tensor = x) -> None:
            loss = m.call_method("loss", x, scale=3.0) if m is ddp else m.loss(x, scale=3.0)  # type: ignore[operator]
            loss.backward()

        check_step(ddp, run)
        if step == 1:  # and forwards beside it
            check_step(ddp, lambda m, x=x: m(x).pow(2).sum().backward())
    with pytest.raises(MisuseError, match="TwoMethods has no method 'looss'"):
        ddp.call_method("looss")


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}], ids=str)
def test_another_method_is_reduced_as_forward_is(world: Callable[[int], Any], options: dict[str, Any]) -> None:
    world(2).run(case_call_method, options=options)
