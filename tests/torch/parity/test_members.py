"""Private members that other libraries and torch's own tests call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import MLP, ConvNet
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


def case_scatter_gather(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(MLP())
    inputs, kwargs = ddp.to_kwargs((torch.ones(2), "text"), {"a": [torch.zeros(1)]}, 0)
    assert torch.equal(inputs[0][0], torch.ones(2))
    assert inputs[0][1] == "text"
    assert torch.equal(kwargs[0]["a"][0], torch.zeros(1))
    assert ddp.train(False) is ddp
    assert not ddp.module.training
    assert ddp.join_device == torch.device("cpu")
    assert ddp.join_process_group is ddp.process_group
    ddp._set_sparse_metadata({"a": torch.zeros(1)})
    ddp._set_ddp_sink_clone(False)
    ddp._register_accum_grad_hook()
    x = torch.randn(5, 8)
    check_step(ddp.train(), lambda m: backward(m, x))


def test_small_members(world: Callable[[int], Any]) -> None:
    world(2).run(case_scatter_gather)
