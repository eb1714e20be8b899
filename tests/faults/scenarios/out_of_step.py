"""Ranks that run other steps than the rest: no collective of one kind may meet one of another."""

import datetime
from typing import Any

import torch
import torch.distributed as dist
from support.models import MLP, ConvNet
from support.oracle import assert_equals_oracle, check_step, oracle
from torch import nn

from faults.table import row
from unified_ddp.hooks import AllReduce, Noop
from unified_ddp.torch import HookState, shared_hook

OUT_OF_STEP = ["out of step", "on rank 0", "on rank 1"]


def loss(out: torch.Tensor) -> torch.Tensor:
    return out.pow(2).mean()


def wrapped(ddp_class: Any, model: nn.Module | None = None, **options: Any) -> Any:
    group = dist.new_group(timeout=datetime.timedelta(seconds=8))
    ddp = ddp_class(model or MLP(), process_group=group, **options)
    for _ in range(2):
        loss(ddp(inputs(ddp))).backward()
    return ddp


def inputs(ddp: Any) -> torch.Tensor:
    return torch.randn(4, 64 if isinstance(ddp.module, ConvNet) else 8)


def step(ddp: Any) -> None:
    loss(ddp(inputs(ddp))).backward()


@row(
    "a rank runs one more backward pass through its forward",
    "an error on all ranks, before gradients are added to others",
    errors={r: [*OUT_OF_STEP, "pass 2 through the outputs of synchronising forward 3"] for r in range(2)},
    timeout=30,
    variants=({}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}),
)
def one_more(ddp_class: Any, rank: int, world_size: int, **options: Any) -> None:
    ddp = wrapped(ddp_class, **options)
    out = loss(ddp(inputs(ddp)))
    out.backward(retain_graph=True)
    if rank == 1:
        out.backward()
    step(ddp)


@row(
    "a rank runs a forward that broadcasts buffers and no backward pass, others go on",
    "an error on all ranks, before buffers meet gradients",
    errors={r: [*OUT_OF_STEP, "broadcasts buffers"] for r in range(2)},
    timeout=30,
)
def buffers_meet_gradients(ddp_class: Any, rank: int, world_size: int) -> None:
    ddp = wrapped(ddp_class, ConvNet())
    out = ddp(inputs(ddp))
    if rank == 1:
        out = ddp(inputs(ddp))
    loss(out).backward()


@row(
    "a rank evaluates with the wrapper, whose buffers are broadcast",
    "an error on all ranks, before buffers meet others",
    errors={r: [*OUT_OF_STEP, "without gradients", "wrapper.module"] for r in range(2)},
    timeout=30,
)
def evaluates(ddp_class: Any, rank: int, world_size: int) -> None:
    ddp = wrapped(ddp_class, ConvNet())
    if rank == 0:
        with torch.no_grad():
            ddp(inputs(ddp))
    step(ddp)


@row(
    "a rank calls sync_gradients, the other runs a backward pass",
    "an error on all ranks",
    errors={r: [*OUT_OF_STEP, "sync_gradients()"] for r in range(2)},
    timeout=30,
)
def other_kinds(ddp_class: Any, rank: int, world_size: int) -> None:
    ddp = wrapped(ddp_class)
    out = loss(ddp(inputs(ddp)))
    if rank == 0:
        ddp.sync_gradients()
    else:
        out.backward()


@row(
    "ranks use two wrappers in another order",
    "an error on all ranks that tells the wrappers apart",
    errors={r: ["out of step", "of wrapper"] for r in range(2)},
    timeout=30,
)
def other_wrapper(ddp_class: Any, rank: int, world_size: int) -> None:
    group = dist.new_group(timeout=datetime.timedelta(seconds=8))
    both = [ddp_class(MLP(), process_group=group) for _ in range(2)]
    for ddp in both:
        step(ddp)
    for ddp in both if rank == 0 else both[::-1]:
        step(ddp)


@row(
    "one rank changes its module, the other does not",
    "an error on all ranks that says which",
    errors={r: ["out of step", "compares the module, which was changed", "on rank 1"] for r in range(2)},
    timeout=30,
)
def changes_on_one(ddp_class: Any, rank: int, world_size: int) -> None:
    ddp = wrapped(ddp_class)
    if rank == 1:
        ddp.module.extra = nn.Linear(2, 2)
    step(ddp)


@row("more forwards under no_sync on one rank", "the mean of what each accumulated")
def more_no_sync(ddp_class: Any, rank: int, world_size: int) -> None:
    ddp = ddp_class(MLP())

    def accumulate(m: nn.Module, batches: list[torch.Tensor]) -> None:
        for x in batches[:-1]:
            if m is ddp:
                with ddp.no_sync():
                    loss(m(x)).backward()
            else:
                loss(m(x)).backward()
        loss(m(batches[-1])).backward()

    for _ in range(3):
        check_step(ddp, lambda m, b=[torch.randn(4, 8) for _ in range(2 + rank)]: accumulate(m, b))


@row("more forwards without a backward pass on one rank", "the mean of what each rank's passes leave")
def more_forwards(ddp_class: Any, rank: int, world_size: int) -> None:
    ddp = ddp_class(MLP())

    def run(m: nn.Module, batches: list[torch.Tensor]) -> None:
        for x in batches[:-1]:
            m(x)
        loss(m(batches[-1])).backward()

    for _ in range(3):
        check_step(ddp, lambda m, b=[torch.randn(4, 8) for _ in range(1 + rank)]: run(m, b))


@row(
    "two forwards, then two backward passes, in another order on each rank",
    "the mean of each pass",
    variants=({}, {"gradient_as_bucket_view": True}),
)
def interleaved(ddp_class: Any, rank: int, world_size: int, **options: Any) -> None:
    ddp = ddp_class(MLP(), **options)

    def run(m: nn.Module, batches: list[torch.Tensor]) -> None:
        outs = [loss(m(x)) for x in batches]
        for out in outs if rank == 0 else outs[::-1]:
            out.backward()

    for _ in range(3):
        check_step(ddp, lambda m, b=[torch.randn(4, 8) for _ in range(2)]: run(m, b))


@row("a forward under no_sync, whose backward pass comes after a synchronising forward", "its gradient stays local")
def local_before_sync(ddp_class: Any, rank: int, world_size: int) -> None:
    ddp = ddp_class(MLP())
    for _ in range(2):
        ddp.zero_grad()
        x, y = torch.randn(4, 8), torch.randn(4, 8)
        local = MLP()
        local.load_state_dict(ddp.module.state_dict())
        loss(local(x)).backward()
        with ddp.no_sync():
            first = loss(ddp(x))
        second = loss(ddp(y))
        first.backward()
        for mine, theirs in zip(ddp.module.parameters(), local.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
        expected = oracle(ddp.module, lambda m, y=y: loss(m(y)).backward())
        second.backward()
        assert_equals_oracle(ddp.module, expected)


FLAGS = (
    {"before": True, "after": False},
    {"before": False, "after": True},
)


@row(
    "require_backward_grad_sync is set between forward and backward",
    "as the flag says when the backward pass runs",
    variants=FLAGS,
)
def flag(ddp_class: Any, rank: int, world_size: int, before: bool, after: bool) -> None:
    ddp = ddp_class(MLP())
    for _ in range(2):
        check_step(ddp, lambda m, x=torch.randn(4, 8): loss(m(x)).backward())
        ddp.zero_grad()
        x = torch.randn(4, 8)
        local = MLP()
        local.load_state_dict(ddp.module.state_dict())
        loss(local(x)).backward()
        ddp.require_backward_grad_sync = before
        out = ddp(x)
        ddp.require_backward_grad_sync = after
        loss(out).backward()
        ddp.require_backward_grad_sync = True
        for mine, theirs in zip(ddp.module.parameters(), local.parameters(), strict=True):
            assert theirs.grad is not None
            if after:
                dist.all_reduce(theirs.grad)
                theirs.grad /= world_size
            torch.testing.assert_close(mine.grad, theirs.grad)


@row(
    "comm hooks of one function with other arguments on each rank",
    "an error on all ranks that names both",
    errors={r: ["comm hook", "Noop", "AllReduce", "on rank 0", "on rank 1"] for r in range(2)},
)
def other_hooks(ddp_class: Any, rank: int, world_size: int) -> None:
    ddp = ddp_class(MLP())
    ddp.register_comm_hook(HookState(Noop() if rank == 0 else AllReduce()), shared_hook)
    step(ddp)
