"""Members of torch's Reducer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import MLP, TwoHeads
from support.oracle import check_step
from torch import nn

from unified_ddp.torch import DistributedDataParallel


def backward(module: nn.Module, x: torch.Tensor) -> None:
    module(x).pow(2).mean().backward()


def case_used_map(rank: int, world_size: int) -> list[int]:
    ddp = DistributedDataParallel(TwoHeads(), find_unused_parameters=True)
    ddp(torch.randn(5, 8), "lr"[rank])["lr"[rank]].sum().backward()
    return ddp.reducer._get_local_used_map().tolist()


def test_local_used_map_counts_ranks(world: Callable[[int], Any]) -> None:
    for counts in world(2).run(case_used_map):
        assert counts == [2, 2, 1, 1, 1, 1]


def case_late_static_graph(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(TwoHeads())
    ddp._set_static_graph()
    assert ddp.static_graph
    for _ in range(3):  # "right" is used in no iteration
        x = torch.randn(5, 8)
        check_step(ddp, lambda m, x=x: m(x, "l")["l"].pow(2).sum().backward())
    with pytest.warns(UserWarning, match="no need to set it again"):
        ddp._set_static_graph()
    other = DistributedDataParallel(MLP())
    backward(other, torch.randn(5, 8))
    with pytest.raises(RuntimeError, match="before training loop starts"):
        other._set_static_graph()


def test_static_graph_set_after_construction(world: Callable[[int], Any]) -> None:
    world(2).run(case_late_static_graph)
