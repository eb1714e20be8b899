"""Exceptions that the user catches."""

import contextlib
import copy
import datetime
from typing import Any

import torch
import torch.distributed as dist
from support.models import MLP
from support.oracle import assert_equals_oracle, check_step, oracle
from torch import nn

from faults.table import row


class OnPurpose(Exception):
    """Raised by the scenarios."""


class Failing(torch.autograd.Function):
    fail = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if Failing.fail:
            raise OnPurpose
        return grad


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = MLP(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, fail: bool = False) -> torch.Tensor:
        x = self.first(x)
        if fail:
            raise OnPurpose
        return self.last(Failing.apply(x))


def loss(out: torch.Tensor) -> torch.Tensor:
    return out.pow(2).mean()


def train(ddp: Any, steps: int = 2) -> None:
    for _ in range(steps):
        check_step(ddp, lambda m, x=torch.randn(5, 8): loss(m(x)).backward())


def fail_in_backward(ddp: Any) -> None:
    Failing.fail = True
    try:
        with contextlib.suppress(OnPurpose):
            loss(ddp(torch.randn(5, 8))).backward()
    finally:
        Failing.fail = False


OPTIONS = ({}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"static_graph": True})


@row("an exception in the forward, on all ranks", "the next step is as any other", variants=OPTIONS)
def in_forward(ddp_class: Any, rank: int, world_size: int, **options: Any) -> None:
    ddp = ddp_class(Model(), **options)
    for _ in range(2):
        with contextlib.suppress(OnPurpose):
            ddp(torch.randn(5, 8), fail=True)
        train(ddp)


@row("an exception in the backward, on all ranks", "after zero_grad the next step is as any other", variants=OPTIONS)
def in_backward(ddp_class: Any, rank: int, world_size: int, **options: Any) -> None:
    ddp = ddp_class(Model(), bucket_cap_mb=0.0001, **options)
    for when in (0, 2):
        train(ddp, when)
        fail_in_backward(ddp)
        train(ddp)


@row("an exception in the backward on all ranks, gradients kept", "adds to what it left")
def in_backward_kept(ddp_class: Any, rank: int, world_size: int) -> None:
    ddp = ddp_class(Model(), bucket_cap_mb=0.0001)
    train(ddp)
    ddp.zero_grad()
    fail_in_backward(ddp)
    x = torch.randn(5, 8)
    expected = oracle(ddp.module, lambda m: loss(m(x)).backward())
    loss(ddp(x)).backward()
    assert_equals_oracle(ddp.module, expected)


@row("an exception in the backward on all ranks, then no_sync", "a local gradient, then any other step")
def in_backward_then_local(ddp_class: Any, rank: int, world_size: int) -> None:
    ddp = ddp_class(Model(), bucket_cap_mb=0.0001)
    train(ddp)
    fail_in_backward(ddp)
    ddp.zero_grad()
    plain, x = copy.deepcopy(ddp.module), torch.randn(5, 8)
    loss(plain(x)).backward()
    with ddp.no_sync():
        loss(ddp(x)).backward()
    for (name, p), q in zip(ddp.module.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name
    train(ddp)


@row("an exception in a comm hook, on all ranks", "the next step is as any other", variants=({"late": 0}, {"late": 1}))
def in_hook(ddp_class: Any, rank: int, world_size: int, late: int) -> None:
    ddp = ddp_class(Model(), bucket_cap_mb=0.0001)
    calls = {"fail": -1}

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if calls["fail"] == bucket.index():
            raise OnPurpose
        work = dist.all_reduce(bucket.buffer().div_(world_size), async_op=True)
        return work.get_future().then(lambda f: f.value()[0])

    ddp.register_comm_hook(None, hook)
    train(ddp)
    calls["fail"] = late
    with contextlib.suppress(OnPurpose, RuntimeError):
        loss(ddp(torch.randn(5, 8))).backward()
    calls["fail"] = -1
    train(ddp)


@row(
    "an exception in the backward, on one rank only",
    "gradients of different steps must not be added: errors",
    errors={0: ["rank 1"], 1: ["rank 0"]},
)
def in_backward_on_one(ddp_class: Any, rank: int, world_size: int) -> None:
    group = dist.new_group(timeout=datetime.timedelta(seconds=4))
    ddp = ddp_class(Model(), process_group=group, bucket_cap_mb=0.0001)
    train(ddp)
    Failing.fail = rank == 1
    try:
        with contextlib.suppress(OnPurpose):
            loss(ddp(torch.randn(5, 8))).backward()
    finally:
        Failing.fail = False
    loss(ddp(torch.randn(5, 8))).backward()
