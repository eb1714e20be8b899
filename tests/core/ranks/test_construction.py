"""Ranks, here threads, compare what they were constructed with."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from unified_ddp import ConstructionMismatchError, ParamSpec
from unified_ddp.ranks.construction import any_spec, check_construction

WAIT = 30.0


class Hall:
    """Gathers between threads, and counts what is gathered."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.told: list[Any] = [None] * size
        self.gathered: list[str] = []

    def gather(self, rank: int, value: Any, kind: str) -> list[Any]:
        self.told[rank] = value
        self.barrier.wait(WAIT)
        every = list(self.told)
        self.barrier.wait(WAIT)
        if rank == 0:
            self.gathered.append(kind)
        return every


class Member:
    def __init__(self, hall: Hall, rank: int) -> None:
        self.hall, self.rank = hall, rank

    def all_gather_ints(self, value: int) -> list[int]:
        assert 0 <= value < 2**64
        return self.hall.gather(self.rank, value, "ints")

    def all_gather_text(self, text: str) -> list[str]:
        return self.hall.gather(self.rank, text, "text")


def compare(*ranks: dict[str, Any], member: str = "rank") -> tuple[list[str | None], list[str]]:
    """Returns what each rank raises, and what was gathered."""
    hall = Hall(len(ranks))

    def run(rank: int) -> str | None:
        given = {"parameters": [], "buffers": [], "options": {}} | ranks[rank]
        try:
            check_construction(Member(hall, rank), **given, member=member)
        except ConstructionMismatchError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(run, range(len(ranks)))), hall.gathered


def spec(name: str = "w", shape: tuple[int, ...] = (2, 3), dtype: str = "float32", **fields: Any) -> ParamSpec:
    return ParamSpec(name, shape, dtype, **fields)


REMEDY = "Build the same model on every rank; nothing was broadcast."
MISMATCHES: dict[str, tuple[Callable[[bool], dict[str, Any]], str]] = {
    "shape": (
        lambda odd: {"parameters": [spec(), spec("v", (3, 2) if odd else (2, 3))]},
        "ranks hold different parameters: the shape of parameter 'v' is [2, 3] on ranks 0, 2, [3, 2] on rank 1. "
        + REMEDY,
    ),
    "dtype": (
        lambda odd: {"buffers": [spec(dtype="bool" if odd else "int64")]},
        f"ranks hold different buffers: the dtype of buffer 'w' is int64 on ranks 0, 2, bool on rank 1. {REMEDY}",
    ),
    "order": (
        lambda odd: {"parameters": [spec("b"), spec("a")] if odd else [spec("a"), spec("b")]},
        f"ranks hold different parameters: parameter number 0 is 'a' on ranks 0, 2, 'b' on rank 1. {REMEDY}",
    ),
    "count": (
        lambda odd: {"parameters": [spec("a")] + [spec("b")] * (not odd)},
        "ranks hold different parameters: parameter number 1 is 'b' on ranks 0, 2, absent on rank 1. The ranks have 2 "
        f"parameters on ranks 0, 2, 1 parameters on rank 1. {REMEDY}",
    ),
    "trainable": (
        lambda odd: {"parameters": [spec(trainable=not odd)]},
        "ranks hold different parameters: the trainable of parameter 'w' is True on ranks 0, 2, False on rank 1. "
        + REMEDY,
    ),
    "strides": (
        lambda odd: {"parameters": [spec(strides=(1, 2) if odd else ())]},
        "ranks hold different parameters: the strides of parameter 'w' is [3, 1] on ranks 0, 2, [1, 2] on rank 1. "
        + REMEDY,
    ),
    "unknown dtype": (
        lambda odd: {"buffers": [any_spec("q", [2], "qint8" if odd else "int8")]},
        f"ranks hold different buffers: buffer number 0 is 'q' on ranks 0, 2, 'q (qint8)' on rank 1. {REMEDY}",
    ),
    "options": (
        lambda odd: {"options": {"a": 1, "caps": [1, 2 + odd]}},
        "ranks were constructed with different options: caps is [1, 2] on ranks 0, 2, [1, 3] on rank 1. Pass the same "
        "on every rank.",
    ),
    "an option that others lack": (
        lambda odd: {"options": {"a": 1} if odd else {}},
        "ranks were constructed with different options: a is None on ranks 0, 2, 1 on rank 1. Pass the same on every "
        "rank.",
    ),
}


@pytest.mark.parametrize("kind", MISMATCHES)
def test_every_rank_names_the_first_difference(kind: str) -> None:
    make, message = MISMATCHES[kind]
    assert compare(make(False), make(True), make(False)) == ([message] * 3, ["ints", "text"])


def test_the_other_name_of_ranks() -> None:
    (message, _), _ = compare({"options": {"a": 1}}, {"options": {"a": 2}}, member="process")
    assert message == (
        "processes were constructed with different options: a is 1 on process 0, 2 on process 1. Pass the same on "
        "every process."
    )


def test_what_ranks_may_hold_in_their_own_way_costs_one_gathering() -> None:
    def rank(device: str, sparse: bool, strides: tuple[int, ...]) -> dict[str, Any]:
        lone = spec("lone", (1, 3), strides=strides)
        return {"parameters": [spec(device=device, sparse=sparse), lone], "options": {"b": [1], "a": None}}

    assert compare(rank("cpu", False, ()), rank("cuda:1", True, (7, 1))) == ([None, None], ["ints"])
