"""A rank whose backward pass raises, and whose process ends by it: the others say who raised what, within moments."""

import os
import socket
import subprocess
import sys

import pytest

PROGRAM = """
import datetime, sys
import torch, torch.distributed as dist
from torch import nn
from unified_ddp.torch import DistributedDataParallel

dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=5))

class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if dist.get_rank() == int(sys.argv[1]):
            raise ValueError("on purpose")
        return grad

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(Raises.apply(self.first(x)))

ddp = DistributedDataParallel(Model())
ddp(torch.randn(2, 4)).sum().backward()
"""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(raising: int) -> list[subprocess.Popen[str]]:
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return [
        subprocess.Popen(
            [sys.executable, "-P", "-c", PROGRAM, str(raising)],
            env=os.environ | common | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]


@pytest.mark.timeout(120)
def test_the_survivor_names_rank_and_exception() -> None:
    """Rank 0 hosts the store in which ranks leave signs, so it must outlive its own exception for a moment."""
    worlds = [start(raising) for raising in range(2)]
    try:
        for raising, world in enumerate(worlds):
            said = [process.communicate(timeout=90)[0] for process in world]
            assert "ValueError: on purpose" in said[raising]
            survivor = said[1 - raising]
            assert "ReductionError: synchronising backward pass 1" in survivor, survivor
            assert f"rank {raising} raised ValueError: on purpose" in survivor, survivor
    finally:
        for process in (p for world in worlds for p in world):
            process.kill()
            process.wait()
