"""`check_gradients_every`: reduced gradients beside sums made apart."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.ids import named
from support.models import MLP, Mixed, TiedEmbedding, TwoHeads
from support.oracle import check_step
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

from unified_ddp.errors import ReductionError
from unified_ddp.torch import DistributedDataParallel

SMALL = {"bucket_cap_mb": 0.0005}


def backward(module: nn.Module, x: torch.Tensor) -> None:
    (module(x).abs() ** 2).float().mean().backward()


def case_right(rank: int, world_size: int, make: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    ddp = DistributedDataParallel(make(), check_gradients_every=2, **options)
    tokens = isinstance(ddp.module, TiedEmbedding)
    for step in range(4):
        if options.get("reduction") == "weighted_mean":
            ddp.set_weight(rank + 1.0)
        if step % 2 == 0:
            ddp.zero_grad()
        with ddp.no_sync():
            backward(ddp, torch.randint(0, 20, (6,)) if tokens else torch.randn(5, 8))
        backward(ddp, torch.randint(0, 20, (6,)) if tokens else torch.randn(5, 8))
        ddp.sync_gradients()


def sparse() -> nn.Module:
    return TiedEmbedding(sparse=True)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (MLP, {}),
        (Mixed, SMALL),
        (sparse, SMALL),
        (MLP, {"gradient_as_bucket_view": True}),
        (MLP, {"reduction": "sum"}),
        (MLP, {"reduction": "weighted_mean"}),
        (MLP, {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}),
        (MLP, {"mixed_precision": _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}),
    ],
    ids=named,
)
def test_right_gradients_pass(
    world: Callable[[int], Any], make: Callable[[], nn.Module], options: dict[str, Any]
) -> None:
    world(2).run(case_right, make=make, options=options)


def case_unused(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(TwoHeads(), find_unused_parameters=True, check_gradients_every=1)
    for head in ("lr"[rank], "l", "lr"[1 - rank]):
        check_step(ddp, lambda m, h=head: m(torch.ones(5, 8) * (rank + 1), h)[h].pow(2).sum().backward())


def test_unused_parameters(world: Callable[[int], Any]) -> None:
    world(2).run(case_unused)


def case_wrong(rank: int, world_size: int) -> str:
    """One rank's part is changed after it was packed, in the second pass: the check is due then."""
    ddp = DistributedDataParallel(MLP(), check_gradients_every=2, **SMALL)
    start = ddp.reducer.transport.all_reduce

    def changed(storage: torch.Tensor) -> Any:
        if rank == 1 and storage is ddp.reducer.backend.storages[1].flat:
            storage.mul_(1.001)
        return start(storage)

    backward(ddp, torch.randn(5, 8))
    ddp.reducer.transport.all_reduce = changed
    out = ddp(torch.randn(5, 8))
    with pytest.raises(ReductionError) as caught:
        (out**2).mean().backward()
    names = [ddp.plan.params[i].name for i in ddp.plan.buckets[1].params]
    assert any(f"{name} is off by" in str(caught.value) for name in names)
    return str(caught.value)


def test_a_changed_contribution_is_named_on_all_ranks(world: Callable[[int], Any]) -> None:
    for message in world(2).run(case_wrong):
        assert "synchronising backward pass 2, bucket 1" in message
        assert "on ranks 0, 1" in message
