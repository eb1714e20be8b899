"""Libraries that construct torch's class get ours from `install()`; each test runs where the library is installed."""

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from support.models import MLP
from support.oracle import mean_over_ranks

from unified_ddp.torch import DistributedDataParallel, install


def case_accelerate(rank: int, world_size: int, accumulate: int, options: dict[str, Any]) -> None:
    """Accelerate's whole loop, held against plain steps by the mean of the ranks' gradients."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in variables.items()}), install():
        from accelerate import Accelerator, DistributedDataParallelKwargs

        accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=accumulate,
            kwargs_handlers=[DistributedDataParallelKwargs(**options)],
        )
        assert accelerator.num_processes == world_size
        torch.manual_seed(3)
        other, module = MLP(), MLP()
        module.load_state_dict(other.state_dict())
        model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        assert type(model) is DistributedDataParallel
        assert accelerator.unwrap_model(model) is module
        expected = torch.optim.SGD(other.parameters(), lr=0.1)
        torch.manual_seed(100 + rank)
        for i in range(4):
            x = torch.randn(5, 8)
            with accelerator.accumulate(model):
                accelerator.backward(model(x).pow(2).mean())
                optimizer.step()
                optimizer.zero_grad()
            (other(x).pow(2).mean() / accumulate).backward()
            if (i + 1) % accumulate == 0:
                for p in other.parameters():
                    mean = mean_over_ranks(p.grad, p)
                    assert mean is not None
                    p.grad = mean.to(p.dtype)
                expected.step()
                expected.zero_grad()
        for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)
        accelerator.free_memory()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True, "static_graph": True}], ids=str)
def test_accelerate(world: Callable[[int], Any], accumulate: int, options: dict[str, Any]) -> None:
    pytest.importorskip("accelerate")
    world(2).run(case_accelerate, accumulate=accumulate, options=options, timeout=120)
