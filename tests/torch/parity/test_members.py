"""Private members that other libraries and torch's own tests call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import MLP, ConvNet, TwoHeads
from support.oracle import check_step, local_copy
from torch import nn

from unified_ddp.torch import DistributedDataParallel


def backward(module: nn.Module, x: torch.Tensor) -> None:
    module(x).pow(2).mean().backward()


def case_other_group(rank: int, world_size: int) -> None:
    """Training goes on with fewer ranks, then with all again; gradients are the mean over the group of the moment."""
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=0.001)
    for _ in range(2):
        check_step(ddp, lambda m: backward(m, torch.ones(5, 8) * (rank + 1)))
    ddp._update_process_group(alone)
    for _ in range(3):
        x = torch.randn(5, 8)
        other = local_copy(ddp.module)
        for module in (other, ddp):
            module.zero_grad()
            backward(module, x)
        for mine, theirs in zip(ddp.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
    ddp._update_process_group(dist.group.WORLD)
    for _ in range(3):
        check_step(ddp, lambda m: backward(m, torch.ones(5, 8) * (rank + 1)))


def test_update_process_group(world: Callable[[int], Any]) -> None:
    world(2).run(case_other_group)


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


def case_small(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(ConvNet())
    assert ddp.broadcast_bucket_size == 250 * 1024 * 1024
    assert ddp._get_active_ddp_module() is None
    params, sparse = ddp._build_params_for_reducer()
    assert len(params) == len(sparse) == len(list(ddp.parameters()))
    assert not any(sparse)
    names = ddp._build_debug_param_to_name_mapping(params)
    assert [names[i] for i in range(len(params))] == [n for n, _ in ddp.module.named_parameters()]
    assert all(p is q for p, q in zip(ddp._get_data_parallel_params(ddp.module), params, strict=True))
    ddp._set_ddp_runtime_logging_sample_rate(3)
    for _ in range(14):
        backward(ddp, torch.randn(5, 64))
    assert ddp._get_ddp_logging_data()["iteration"] == 12  # the first ten, then every third
    with pytest.raises(ValueError, match="equal or greater than 1"):
        ddp._set_ddp_runtime_logging_sample_rate(0)
    ddp._check_reducer_finalized()
    ddp._remove_autograd_hooks()
    ddp.zero_grad()
    x = torch.randn(5, 64)
    other = local_copy(ddp.module)
    backward(other, x)
    with ddp.no_sync():
        backward(ddp, x)
    for mine, theirs in zip(ddp.module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_the_rest(world: Callable[[int], Any]) -> None:
    world(2).run(case_small)


def case_joined(rank: int, world_size: int) -> int:
    """When all have joined, the model is the one of a rank that joined last."""
    ddp = DistributedDataParallel(ConvNet())
    with ddp.join():
        for _ in range(2 + 2 * (1 - rank)):
            backward(ddp, torch.randn(5, 64))
    state = [t.double() for t in ddp.module.state_dict().values()]
    everybodys = [torch.empty_like(torch.cat([t.reshape(-1) for t in state])) for _ in range(world_size)]
    dist.all_gather(everybodys, torch.cat([t.reshape(-1) for t in state]))
    assert torch.equal(everybodys[0], everybodys[1])
    return ddp._authoritative_rank


def test_authoritative_rank(world: Callable[[int], Any]) -> None:
    assert world(2).run(case_joined) == [0, 0]
