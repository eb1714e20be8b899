"""What torch's classes before torch 2.13 read of a wrapper; `make test-oldest` runs the oldest itself."""

from collections.abc import Callable
from typing import Any

import torch
from support.models import ConvNet
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from unified_ddp.torch import DistributedDataParallel


def attribute(rank: int, world_size: int) -> tuple[bool, bool, bool]:
    ddp = DistributedDataParallel(ConvNet())
    inherited = TorchDDP.__dict__.get("broadcast_buffers")
    if inherited is not None:
        del TorchDDP.broadcast_buffers
    try:
        before = ddp.broadcast_buffers
        ddp.broadcast_buffers = False
        return before, ddp.broadcast_buffers, ddp.forward_sync_buffers
    finally:
        if inherited is not None:
            TorchDDP.broadcast_buffers = inherited


def test_broadcast_buffers_does_not_come_from_torchs_class(world: Callable[[int], Any]) -> None:
    assert world(2).run(attribute) == [(True, False, False)] * 2


def version_counters(rank: int, world_size: int) -> bool:
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), ConvNet()).eval())
    before = [b._version for b in ddp.module.buffers()]
    ddp(torch.randn(5, 64))
    return before == [b._version for b in ddp.module.buffers()]


def test_a_sync_is_no_change_to_graphs_that_saved_buffers(world: Callable[[int], Any]) -> None:
    assert world(2).run(version_counters) == [True, True]
