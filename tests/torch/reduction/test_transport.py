"""Collectives of one process group, and its store."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from unified_ddp.torch.reduction.transport import GroupStore, ProcessGroupTransport

CPU = torch.device("cpu")
LARGE = [0, (1 << 64) - 1, (1 << 63) + 12345, 1 << 32, (1 << 32) - 1]
TEXTS = ["", "one", "zwölf Boxkämpfer \N{SNOWMAN}", "x" * 5000]


def case_gathers(rank: int, world_size: int) -> None:
    transport = ProcessGroupTransport(dist.group.WORLD, CPU)
    assert (transport.rank, transport.world_size) == (rank, world_size)
    for shift in range(len(LARGE)):
        values = [LARGE[(r + shift) % len(LARGE)] for r in range(world_size)]
        assert transport.all_gather_ints(values[rank]) == values
    for shift in range(len(TEXTS)):
        texts = [TEXTS[(r + shift) % len(TEXTS)] for r in range(world_size)]
        assert transport.all_gather_text(texts[rank]) == texts
    assert transport.all_gather_text("") == [""] * world_size
    for source in range(world_size):
        wanted = [source, -(1 << 62), (1 << 63) - 1]
        mine = wanted if rank == source else [0, 0, 0]
        assert transport.broadcast_ints(mine, source) == wanted
    assert transport.broadcast_ints([rank]) == [0]


def test_small_things_arrive_whole(world: Callable[[int], Any]) -> None:
    world(3).run(case_gathers)


def case_sums(rank: int, world_size: int) -> None:
    transport = ProcessGroupTransport(dist.group.WORLD, CPU)
    assert transport.backend_name == "gloo"
    assert transport.sums_sparse
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.complex64):
        storage = (torch.arange(4) * (rank + 1)).to(dtype)
        storage = storage * (1 + 2j) if dtype is torch.complex64 else storage
        want = storage / (rank + 1) * sum(range(1, world_size + 1))
        transport.all_reduce(storage).wait()
        assert torch.equal(storage, want.to(dtype))
    sparse = torch.sparse_coo_tensor([[rank]], [[1.0, 2.0]], (world_size, 2))
    transport.all_reduce(sparse).wait()
    assert torch.equal(sparse.to_dense(), torch.tensor([[1.0, 2.0]] * world_size))
    minus = torch.full((2,), -0.0, dtype=torch.complex64)
    torch.view_as_real(minus).fill_(-0.0)
    transport.all_reduce(minus).wait()
    assert bool(torch.signbit(torch.view_as_real(minus)).all())  # only if every rank sent negative zeros


def test_sums_in_place(world: Callable[[int], Any]) -> None:
    world(3).run(case_sums)


def case_subgroup(rank: int, world_size: int) -> None:
    group = dist.new_group([2, 1])
    if rank == 0:
        return
    transport = ProcessGroupTransport(group, CPU)
    assert (transport.rank, transport.world_size) == (rank - 1, 2)  # ranks of the group
    assert transport.all_gather_ints(rank) == [1, 2]
    assert transport.all_gather_text(str(rank)) == ["1", "2"]
    assert transport.broadcast_ints([rank], source=1) == [2]
    assert transport.name != ProcessGroupTransport(dist.group.WORLD, CPU).name
    store = transport.store()
    assert store is not None
    store.set(f"tests/{rank}", f"from {rank}")
    dist.barrier(group=group)
    assert store.get(f"tests/{3 - rank}") == f"from {3 - rank}"
    assert store.get("tests/never") is None


def test_a_subgroup(world: Callable[[int], Any]) -> None:
    world(3).run(case_subgroup)


def test_a_store() -> None:
    store = GroupStore(dist.HashStore())
    assert store.get("key") is None
    store.set("key", "\N{SNOWMAN}")
    store.set("key", "again")
    assert store.get("key") == "again"


class WithoutStore:
    def get_group_store(self) -> Any:
        raise RuntimeError("none was given")


@pytest.mark.parametrize("group", [WithoutStore(), object()], ids=["none", "no such method"])
def test_a_group_without_a_store(group: Any) -> None:
    assert ProcessGroupTransport(group, CPU).store() is None
