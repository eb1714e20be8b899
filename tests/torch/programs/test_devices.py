"""The cases that GPUs are judged by, on the CPU."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from support import device_cases as cases
from support import jax_replicas

from unified_ddp.torch.reduction.transport import ProcessGroupTransport

# what other tests do not run in this form already
RUNS: list[tuple[str, dict[str, Any]]] = [
    ("case_training", {"model": "conv and batch norm", "options": "views, static graph"}),
    ("case_training", {"model": "mixed dtypes, complex", "options": "small buckets, views"}),
    ("case_no_sync", {"options": "small buckets, views"}),
    ("case_unused", {"skip": False}),
    ("case_unused", {"skip": True}),
    ("case_mixed_precision", {"dtype": "bfloat16", "model": "convolutions, channels_last"}),
    ("case_mixed_precision", {"dtype": "float16", "model": "mlp"}),
    *(("case_hook", {"hook": hook, "view": True}) for hook in cases.HOOKS),
    ("case_quantized", {}),
    ("case_optimizer_in_backward", {"view": True}),
]


@pytest.mark.parametrize(("case", "arguments"), RUNS, ids=lambda value: str(value).replace("case_", ""))
def test_on_the_cpu(world: Callable[[int], Any], case: str, arguments: dict[str, Any]) -> None:
    world(2).run(getattr(cases, case), device="cpu", **arguments)


def test_differing_models_are_named(world: Callable[[int], Any]) -> None:
    for message in world(2).run(cases.case_differing_models, device="cpu"):
        assert "[16, 8] on rank 0" in message


def test_logging_data(world: Callable[[int], Any]) -> None:
    for data in world(2).run(cases.case_logging, device="cpu"):
        assert data["avg_backward_compute_time"] > 0


def case_dense_sums(rank: int, world_size: int) -> None:
    with mock.patch.object(ProcessGroupTransport, "sums_sparse", False):
        cases.case_training(rank, world_size, "cpu", "sparse embedding", "small buckets")


def test_sparse_gradients_where_the_backend_sums_none(world: Callable[[int], Any]) -> None:
    world(2).run(case_dense_sums)


def test_jax_replicas_agree_with_torch_ranks(world: Callable[[int], Any]) -> None:
    jax_replicas.assert_agree(jax_replicas.jax_gradients("cpu", 2), world(2).run(jax_replicas.case_torch, device="cpu"))
