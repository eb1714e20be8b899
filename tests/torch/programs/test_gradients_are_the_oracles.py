"""Reduced gradients against the oracle: models, options, and shapes of the training loop."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import MLP, Checkpointed, ConvNet, Mixed, TiedEmbedding, TwoHeads
from support.oracle import assert_equals_oracle, check_step, oracle
from torch import nn

from unified_ddp.torch import DistributedDataParallel

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "mlp": (MLP, lambda: torch.randn(5, 8)),
    "one large parameter": (lambda: MLP(300, 2), lambda: torch.randn(5, 8)),
    "conv and batch norm": (ConvNet, lambda: torch.randn(5, 64)),
    "channels_last": (lambda: ConvNet(channels_last=True), lambda: torch.randn(5, 64)),
    "mixed dtypes": (Mixed, lambda: torch.randn(5, 8)),
    "tied embedding": (TiedEmbedding, lambda: torch.randint(0, 20, (5, 3))),
    "sparse embedding": (lambda: TiedEmbedding(sparse=True), lambda: torch.randint(0, 20, (5, 3))),
    "checkpoint": (lambda: Checkpointed(reentrant=False), lambda: torch.randn(5, 8)),
    "reentrant checkpoint": (lambda: Checkpointed(reentrant=True), lambda: torch.randn(5, 8)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 0.0005},
    "small buckets, views": {"bucket_cap_mb": 0.0005, "gradient_as_bucket_view": True},
    "bucket list": {"bucket_cap_mb_list": [0.0001, 0.002]},
    "find unused": {"find_unused_parameters": True, "bucket_cap_mb": 0.0005},
    "static graph": {"static_graph": True, "bucket_cap_mb": 0.0005},
}


def backward(module: nn.Module, x: torch.Tensor) -> None:
    out = module(x)
    (out.abs() ** 2).mean().backward()


def case_training(rank: int, world_size: int, model: str, options: dict[str, Any], set_to_none: bool) -> None:
    make, data = MODELS[model]
    ddp = DistributedDataParallel(make(), **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for _ in range(4):
        x = data()
        optimizer.zero_grad(set_to_none=set_to_none)
        expected = oracle(ddp.module, lambda m, x=x: backward(m, x))
        backward(ddp, x)
        assert_equals_oracle(ddp.module, expected)
        optimizer.step()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("model", MODELS)
def test_training(world: Callable[[int], Any], model: str, options: str) -> None:
    world(2).run(case_training, model=model, options=OPTIONS[options], set_to_none=True)


@pytest.mark.parametrize("options", ["default", "views"])
@pytest.mark.parametrize("model", ["mlp", "mixed dtypes", "channels_last"])
def test_gradients_kept_as_zeros(world: Callable[[int], Any], model: str, options: str) -> None:
    world(2).run(case_training, model=model, options=OPTIONS[options], set_to_none=False)


@pytest.mark.parametrize("options", ["small buckets", "small buckets, views", "find unused"])
def test_three_ranks(world: Callable[[int], Any], options: str) -> None:
    world(3).run(case_training, model="mlp", options=OPTIONS[options], set_to_none=True)


def case_no_sync(rank: int, world_size: int, options: dict[str, Any]) -> None:
    ddp = DistributedDataParallel(MLP(), **options)
    for _ in range(3):
        ddp.zero_grad()
        batches = [torch.randn(5, 8) for _ in range(3)]

        def accumulate(m: nn.Module, batches: list[torch.Tensor] = batches) -> None:
            for x in batches:
                backward(m, x)

        expected = oracle(ddp.module, accumulate)
        with ddp.no_sync():
            local = oracle_local(ddp.module, batches[:2])
            for x in batches[:2]:
                backward(ddp, x)
            for name, p in ddp.module.named_parameters():
                torch.testing.assert_close(p.grad, local[name])
        backward(ddp, batches[2])
        assert_equals_oracle(ddp.module, expected)


def oracle_local(module: nn.Module, batches: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    from support.oracle import local_copy

    other = local_copy(module)
    for x in batches:
        backward(other, x)
    return {n: p.grad for n, p in other.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("options", ["default", "small buckets, views", "find unused", "static graph"])
def test_no_sync_accumulates(world: Callable[[int], Any], options: str) -> None:
    world(2).run(case_no_sync, options=OPTIONS[options])


def two_forwards(m: nn.Module, x: torch.Tensor) -> None:
    a, b = m(x).sum(), m(x * 2).pow(2).sum()
    a.backward()
    b.backward()


def retained(m: nn.Module, x: torch.Tensor) -> None:
    out = m(x)
    out.sum().backward(retain_graph=True)
    out.pow(2).sum().backward()


def weight_outside_forward(m: nn.Module, x: torch.Tensor) -> None:
    inner = getattr(m, "module", m)
    (m(x).sum() + inner.head.weight.pow(2).sum()).backward()


def penalty(m: nn.Module, x: torch.Tensor) -> None:
    x = x.clone().requires_grad_()
    out = m(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (out.sum() + grad.pow(2).sum()).backward()


def in_place_on_output(m: nn.Module, x: torch.Tensor) -> None:
    out = m(x)
    out.mul_(2).add_(1)
    out.pow(2).sum().backward()


def create_graph(m: nn.Module, x: torch.Tensor) -> None:
    m(x).pow(2).sum().backward(create_graph=True)


PROGRAMS = [two_forwards, retained, weight_outside_forward, penalty, in_place_on_output, create_graph]


def case_program(rank: int, world_size: int, program: str, options: dict[str, Any]) -> None:
    run = globals()[program]
    ddp = DistributedDataParallel(MLP(), **options)
    for _ in range(3):
        x = torch.randn(5, 8)
        check_step(ddp, lambda m, x=x: run(m, x))


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("options", ["default", "small buckets, views", "find unused", "static graph"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_shapes_of_the_loop(world: Callable[[int], Any], program: Any, options: str) -> None:
    world(2).run(case_program, program=program.__name__, options=OPTIONS[options])


def case_unused(rank: int, world_size: int, options: dict[str, Any]) -> None:
    ddp = DistributedDataParallel(TwoHeads(), **options)
    # both ranks left only; ranks differ; one head in no loss although it was run; all
    for heads in ["ll", "lr", "rl", "rr", "both"]:
        x = torch.randn(5, 8)
        ddp.zero_grad()
        mine = "lr" if heads == "both" else heads[rank]

        def run(m: nn.Module, x: torch.Tensor = x, mine: str = mine) -> None:
            sum(v.pow(2).sum() for v in m(x, mine).values()).backward()

        expected = oracle(ddp.module, run)
        run(ddp)
        assert_equals_oracle(ddp.module, expected)

    def run_both_use_one(m: nn.Module) -> None:
        m(x)["r"].pow(2).sum().backward()

    check_step(ddp, run_both_use_one)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("cap", [None, 0.0001])
def test_unused_parameters(world: Callable[[int], Any], view: bool, cap: float | None) -> None:
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": view, "bucket_cap_mb": cap}
    world(2).run(case_unused, options=options)


def case_unused_without_the_flag(rank: int, world_size: int) -> str:
    ddp = DistributedDataParallel(TwoHeads())
    x = torch.randn(5, 8)
    ddp(x, "l")["l"].sum().backward()
    try:
        ddp(x, "l")
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_unused_without_the_flag_is_named(world: Callable[[int], Any]) -> None:
    for rank, message in enumerate(world(2).run(case_unused_without_the_flag)):
        assert message.startswith("UnusedParameterError")
        assert "right.weight, right.bias" in message
        assert f"for rank {rank}" in message
        assert "left" not in message


def case_heads_one_by_one(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(TwoHeads())
    for _ in range(3):
        x = torch.randn(5, 8)
        ddp.zero_grad()

        def run(m: nn.Module, x: torch.Tensor = x) -> None:
            out = m(x)
            out["l"].sum().backward(retain_graph=True)
            out["r"].pow(2).sum().backward()

        expected = oracle(ddp.module, run)
        run(ddp)
        assert_equals_oracle(ddp.module, expected)


def test_several_backwards_cover_the_parameters(world: Callable[[int], Any]) -> None:
    world(2).run(case_heads_one_by_one)


def case_views(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(MLP(), gradient_as_bucket_view=True)
    for _ in range(2):
        ddp(torch.randn(5, 8)).sum().backward()
    memory = {s.flat.untyped_storage().data_ptr() for s in ddp.reducer.backend.storages}
    for p in ddp.parameters():
        assert p.grad is not None
        assert p.grad.untyped_storage().data_ptr() in memory
    plain = DistributedDataParallel(MLP())
    plain(torch.randn(5, 8)).sum().backward()
    memory = {s.flat.untyped_storage().data_ptr() for s in plain.reducer.backend.storages}
    assert not any(p.grad.untyped_storage().data_ptr() in memory for p in plain.parameters() if p.grad is not None)


def test_gradients_are_views_only_if_asked(world: Callable[[int], Any]) -> None:
    world(2).run(case_views)


def case_ranks_disagree_on_order(rank: int, world_size: int) -> list[str]:
    class Order(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            order = [self.a, self.b, self.c] if rank == 0 else [self.c, self.a, self.b]
            for layer in order:
                x = torch.tanh(layer(x))
            return x

    ddp = DistributedDataParallel(Order(), bucket_cap_mb=0.0001)
    for _ in range(3):
        x = torch.randn(5, 8)
        check_step(ddp, lambda m, x=x: backward(m, x))
    return [ddp.plan.params[i].name for b in ddp.plan.buckets for i in b.params]


def test_buckets_are_rebuilt_in_rank_0s_order(world: Callable[[int], Any]) -> None:
    orders = world(3).run(case_ranks_disagree_on_order)
    assert orders[0] == orders[1] == orders[2]
    assert [name.split(".")[0] for name in orders[0]] == ["c", "c", "b", "b", "a", "a"]


def case_evaluation_between(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(ConvNet())
    for i in range(3):
        x = torch.randn(5, 64)
        check_step(ddp, lambda m, x=x: backward(m, x))
        ddp.eval()
        with torch.no_grad():
            ddp(x)
        ddp.train()
        if i == 1:
            backward(nn.Linear(8, 8), torch.randn(2, 8))


def test_evaluation_between_steps(world: Callable[[int], Any]) -> None:
    world(2).run(case_evaluation_between)


def case_exception_in_backward(rank: int, world_size: int, view: bool) -> str | None:
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=0.0001, gradient_as_bucket_view=view)
    x = torch.randn(5, 8)
    backward(ddp, x)
    ddp.zero_grad()
    handle = ddp.module.layers[0].register_forward_hook(lambda m, a, out: Fails.apply(out))
    with pytest.raises(KeyError):
        backward(ddp, x)
    handle.remove()
    message = None
    if view:
        with pytest.raises(RuntimeError, match=r"head\.weight") as caught:
            ddp(x)
        message = str(caught.value)
    check_step(ddp, lambda m: backward(m, x))
    return message


@pytest.mark.parametrize("view", [False, True])
def test_an_exception_in_backward(world: Callable[[int], Any], view: bool) -> None:
    for message in world(2).run(case_exception_in_backward, view=view):
        assert (message is not None) == view
        if message:
            assert "zero_grad()" in message


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise KeyError("user error")


class LargeHead(nn.Module):
    """A head whose gradient is packed as soon as it comes, over a body that shares its bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 8192)

    def forward(self, x: torch.Tensor, use_head: bool = True, fail: bool = False) -> torch.Tensor:
        h = torch.tanh(self.body(x))
        h = Fails.apply(h) if fail else h
        return self.head(h) if use_head else h


def case_packed_before_an_exception(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(LargeHead(), find_unused_parameters=True)
    x = torch.randn(5, 8)
    with pytest.raises(KeyError):
        ddp(x, fail=True).sum().backward()
    check_step(ddp, lambda m: m(x, use_head=rank == 1).pow(2).sum().backward())


def test_what_an_exception_left_packed_is_not_reduced_later(world: Callable[[int], Any]) -> None:
    world(2).run(case_packed_before_an_exception)


def case_autograd_grad(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(MLP())
    x = torch.randn(5, 8, requires_grad=True)
    torch.autograd.grad(ddp(x).sum(), x)
    torch.autograd.grad(ddp(x).sum(), list(ddp.parameters()))
    assert all(p.grad is None for p in ddp.parameters())
    x = torch.randn(5, 8)
    expected = oracle(ddp.module, lambda m: backward(m, x))
    backward(ddp, x)
    assert_equals_oracle(ddp.module, expected)


def test_autograd_grad_leaves_gradients_alone(world: Callable[[int], Any]) -> None:
    world(2).run(case_autograd_grad)


def case_engine_tells_nothing(rank: int, world_size: int) -> None:
    from unified_ddp.torch.reduction import autograd

    known, autograd._will_execute = autograd._will_execute, None
    try:
        for program in ("two_forwards", "retained", "weight_outside_forward"):
            case_program(rank, world_size, program, {"bucket_cap_mb": 0.0005})
    finally:
        autograd._will_execute = known


def test_without_the_engines_private_function(world: Callable[[int], Any]) -> None:
    world(2).run(case_engine_tells_nothing)


def case_groups(rank: int, world_size: int) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    if rank == 2:
        mine = groups[1]
    elif rank == 0:
        mine = groups[0]
    else:
        return_group = groups
        for group in return_group:
            step_in_group(group)
        return
    step_in_group(mine)


def step_in_group(group: Any) -> None:
    ddp = DistributedDataParallel(MLP(), process_group=group)
    x = torch.full((5, 8), float(dist.get_rank()))
    ddp(x).sum().backward()
    other = MLP()
    other.load_state_dict(ddp.module.state_dict())
    other(x).sum().backward()
    for mine, theirs in zip(ddp.module.parameters(), other.parameters(), strict=True):
        assert theirs.grad is not None
        dist.all_reduce(theirs.grad, group=group)
        torch.testing.assert_close(mine.grad, theirs.grad / 2)


def test_process_groups(world: Callable[[int], Any]) -> None:
    world(3).run(case_groups)
