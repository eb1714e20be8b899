"""torch.compile around the wrapper: dynamo's ways to treat it, and backends."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import MLP
from support.oracle import assert_equals_oracle, oracle

from unified_ddp.torch import DistributedDataParallel


def backward(module: Any, *inputs: torch.Tensor) -> None:
    for x in inputs:
        module(x).pow(2).mean().backward()


def case_mode(rank: int, world_size: int, mode: bool | str, backend: str, options: dict[str, Any]) -> tuple[int, int]:
    """Returns the number of graphs that dynamo compiled, and of buckets."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    with torch._dynamo.config.patch(optimize_ddp=mode):
        ddp = DistributedDataParallel(MLP(600, 3), bucket_cap_mb=1.2, **options)
        counter = CompileCounterWithBackend(backend)
        compiled = torch.compile(ddp, backend=counter)
        for _ in range(3):
            x, more = torch.randn(5, 8), torch.randn(5, 8)
            ddp.zero_grad()
            expected = oracle(ddp.module, lambda m, a=x, b=more: backward(m, a, b))
            with ddp.no_sync():
                backward(compiled, x)
            backward(compiled, more)
            assert_equals_oracle(ddp.module, expected, 1e-4)
        return len(counter.graphs), len(ddp.plan.buckets)


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        (True, {}),
        ("ddp_optimizer", {"static_graph": True, "gradient_as_bucket_view": True}),
        ("ddp_optimizer", {"find_unused_parameters": True}),
        (False, {}),
        ("no_optimization", {"static_graph": True}),
        ("python_reducer", {}),  # without compiled autograd it has nothing to change
    ],
    ids=str,
)
def test_ways_to_treat_the_wrapper(world: Callable[[int], Any], mode: bool | str, options: dict[str, Any]) -> None:
    for graphs, buckets in world(2).run(case_mode, mode=mode, backend="aot_eager", options=options, timeout=200):
        splits = mode in (True, "ddp_optimizer")
        assert graphs == (buckets if splits else 1)
        assert buckets > 1


@pytest.mark.timeout(400)
def test_inductor(world: Callable[[int], Any]) -> None:
    for graphs, buckets in world(2).run(case_mode, mode=True, backend="inductor", options={}, timeout=350):
        assert graphs == buckets
