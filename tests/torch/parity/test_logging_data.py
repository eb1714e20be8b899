"""Logging data under the keys of torch's logger."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import MLP, ConvNet, Mixed, TiedEmbedding, TwoHeads
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from unified_ddp.torch import DistributedDataParallel
from unified_ddp.torch.parity.logging_data import DDPLogger


def backward(module: nn.Module, x: torch.Tensor) -> None:
    module(x).pow(2).mean().backward()


def case_logging(rank: int, world_size: int) -> dict[str, Any]:
    ddp = DistributedDataParallel(MLP())
    for _ in range(3):
        backward(ddp, torch.randn(5, 8))
    return ddp._get_ddp_logging_data()


def test_logging_data(world: Callable[[int], Any]) -> None:
    for rank, data in enumerate(world(2).run(case_logging)):
        assert data["rank"] == rank
        assert data["world_size"] == 2
        assert data["iteration"] == 2
        assert data["num_buckets_reduced"] == 1
        assert data["can_set_static_graph"] == 1
        assert data["avg_backward_comm_time"] > 0


RUNS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, Any]]] = {
    "buffers": (ConvNet, (5, 64), {"forward_sync_buffers": False}),
    "dtypes, small buckets": (Mixed, (5, 8), {"find_unused_parameters": True, "bucket_cap_mb": 0.0005}),
    "rebuilt": (MLP, (5, 8), {"bucket_cap_mb": 0.002, "gradient_as_bucket_view": True}),
    "static graph": (MLP, (5, 8), {"static_graph": True}),
    "unused parameters": (TwoHeads, (5, 8), {"find_unused_parameters": True}),
}


def case_as_torchs(rank: int, world_size: int, kind: str, hook: bool) -> None:
    make, shape, options = RUNS[kind]
    found = []
    for cls in (TorchDDP, DistributedDataParallel):
        ddp = cls(make(), **options)
        if hook:
            ddp.register_comm_hook(None, default_hooks.allreduce_hook)
        before = ddp._get_ddp_logging_data()
        for _ in range(4):
            out = ddp(torch.randn(shape), "l")["l"] if make is TwoHeads else ddp(torch.randn(shape))
            (out.abs() ** 2).sum().backward()
        found.append([before, ddp._get_ddp_logging_data()])
    for theirs, ours in zip(*found, strict=True):
        # torch says when its reducer is dropped that the graph was static
        told = {k for k in theirs if "time" not in k} - {"can_set_static_graph"}
        assert {k: ours.get(k) for k in told} == {k: theirs[k] for k in told}
        assert {k for k in theirs if "time" in k} <= ours.keys()


@pytest.mark.parametrize(("kind", "hook"), [*((kind, False) for kind in RUNS), ("rebuilt", True)])
def test_what_torchs_logger_tells(world: Callable[[int], Any], kind: str, hook: bool) -> None:
    world(2).run(case_as_torchs, kind=kind, hook=hook)


def case_facts(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.SyncBatchNorm(8)))
    assert ddp._get_ddp_logging_data()["has_sync_bn"] == 1
    heads = DistributedDataParallel(TwoHeads())
    data = heads._get_ddp_logging_data
    x = torch.randn(5, 8)
    heads(x)["l"].sum().backward()
    with pytest.raises(RuntimeError) as caught:
        heads(x)
    assert data()["error"] == str(caught.value)
    assert (data()["has_error"], data()["unused_parameter_size"]) == (1, 4 * (16 * 4 + 4))
    with pytest.raises(ValueError, match="on purpose"):
        heads._log_and_throw(ValueError, "on purpose")
    assert data()["error"] == "<class 'ValueError'>: on purpose"
    hooked = DistributedDataParallel(TiedEmbedding())
    hooked._register_builtin_comm_hook(torch.distributed.BuiltinCommHookType.FP16_COMPRESS)
    assert "FP16_COMPRESS" in hooked._get_ddp_logging_data()["comm_hook"]
    with hooked.join():
        assert hooked._get_ddp_logging_data()["join_uneven_inputs"] == 1


def test_facts_and_errors(world: Callable[[int], Any]) -> None:
    world(2).run(case_facts)


@pytest.mark.parametrize(
    ("rate", "sampled"), [(100, [*range(1, 11), 100, 200]), (7, [*range(1, 11), *range(14, 250, 7)])]
)
def test_which_iterations_are_sampled(rate: int, sampled: list[int]) -> None:
    logger = DDPLogger(nn.Module())
    logger.sample_rate = rate
    assert [i for i in range(250) if logger._is_sampled(i)] == sampled
