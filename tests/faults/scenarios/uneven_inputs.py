"""join(), and uneven inputs without it."""

import copy
import datetime
from typing import Any

import torch
import torch.distributed as dist
from support.models import MLP, ConvNet, TwoHeads
from torch import nn
from torch.nn.parallel.distributed import _BufferCommHookLocation

from faults.table import row


def averaged(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda f: f.value()[0])


def backward(module: nn.Module, x: torch.Tensor, **kwargs: Any) -> None:
    out = module(x, **kwargs)
    (out.pow(2).mean() if isinstance(out, torch.Tensor) else sum(v.pow(2).mean() for v in out.values())).backward()


def joined(ddp: Any, rank: int, world_size: int, width: int = 8, **kwargs: Any) -> None:
    """Rank r has 2 + 2r batches, whose values tell rank and step; each step is held against the active ranks' mean."""
    for epoch in range(2):
        with ddp.join():
            for step in range(2 + 2 * rank):
                active = [r for r in range(world_size) if step < 2 + 2 * r]
                data = [torch.full((3, width), 0.1 * (1 + r + step + epoch)) for r in range(world_size)]
                expected: dict[str, torch.Tensor] = {}
                for r in active:
                    other = copy.deepcopy(ddp.module)
                    other.zero_grad()
                    backward(other, data[r], **kwargs)
                    for name, p in other.named_parameters():
                        if p.grad is not None:
                            expected[name] = expected.get(name, 0) + p.grad / world_size  # type: ignore[arg-type]
                ddp.zero_grad()
                backward(ddp, data[rank], **kwargs)
                for name, p in ddp.module.named_parameters():
                    if name in expected:
                        assert p.grad is not None, f"{name} has no gradient in step {step}"
                        worst = (p.grad - expected[name]).abs().max()
                        assert worst <= 1e-5 * expected[name].abs().max() + 1e-9, (
                            f"{name}: off by {worst} in step {step}"
                        )


@row("join with delayed parameters", "the mean over ranks, those without inputs counting as zero")
def delayed(ddp_class: Any, rank: int, world_size: int) -> None:
    model = MLP()
    named = [(n, p) for n, p in model.named_parameters() if n.startswith("layers.0")]
    ddp = ddp_class(model, delay_all_reduce_named_params=named, param_to_hook_all_reduce=model.head.weight)
    joined(ddp, rank, world_size)


@row("join with a comm hook", "the mean over ranks, those without inputs counting as zero")
def hooked(ddp_class: Any, rank: int, world_size: int) -> None:
    ddp = ddp_class(MLP(), bucket_cap_mb=0.001)
    ddp.register_comm_hook(None, averaged)
    joined(ddp, rank, world_size)


@row(
    "join with a buffer hook",
    "the mean over ranks, those without inputs counting as zero",
    variants=({"where": "PRE_FORWARD"}, {"where": "POST_FORWARD"}),
    timeout=30,
)
def buffer_hooked(ddp_class: Any, rank: int, world_size: int, where: str) -> None:
    ddp = ddp_class(ConvNet())

    def hook(state: Any, buffers: dict[str, torch.Tensor]) -> None:
        for buffer in buffers.values():
            dist.all_reduce(buffer)
            buffer.div_(world_size) if buffer.is_floating_point() else None

    ddp.eval()  # running statistics take no part in the gradients of the oracle's copies
    ddp._register_buffer_comm_hook(None, hook, getattr(_BufferCommHookLocation, where))
    joined(ddp, rank, world_size, width=64)


@row("join with unused parameters", "the mean over ranks, those without inputs counting as zero")
def unused(ddp_class: Any, rank: int, world_size: int) -> None:
    ddp = ddp_class(TwoHeads(), find_unused_parameters=True)
    joined(ddp, rank, world_size, heads="l")


@row(
    "uneven numbers of steps without join",
    "ranks that end early: the others' error names them, the bucket and its parameters",
    errors={1: ["rank 0", "bucket 0", "head.bias"]},
    timeout=40,
)
def without_join(ddp_class: Any, rank: int, world_size: int) -> None:
    group = dist.new_group(timeout=datetime.timedelta(seconds=4))
    ddp = ddp_class(MLP(), process_group=group)
    for _ in range(2 + rank):
        backward(ddp, torch.randn(3, 8))
