"""Buckets of given parameters, and ranks that are not there, for tests of one module by itself."""

from collections.abc import Sequence
from typing import Any

import torch

from unified_ddp import BucketPlan, BucketSpec
from unified_ddp.torch.schema import param_spec


def plan_of(params: Sequence[torch.Tensor], buckets: Sequence[Sequence[int]] | None = None) -> BucketPlan:
    """Parameters named p0, p1, ... in the given buckets, or all in one."""
    specs = [param_spec(f"p{i}", p) for i, p in enumerate(params)]
    return BucketPlan(specs, [list(b) for b in buckets or [range(len(params))]])


def bucket_of(params: Sequence[torch.Tensor]) -> BucketSpec:
    return plan_of(params).buckets[0]


class DoneWork:
    """A collective that has ended."""

    def __init__(self, *results: torch.Tensor, error: Exception | None = None) -> None:
        self.results, self.error, self.waits = list(results), error, 0

    def wait(self, *_timeout: Any) -> None:
        self.waits += 1
        if self.error is not None:
            raise self.error

    __call__ = wait

    def is_completed(self) -> bool:
        return True

    def result(self) -> list[torch.Tensor]:
        return self.results


class FakeRanks:
    """Stands for a process group and its transport: every rank holds what this one does, unless it is told otherwise.

    Attributes:
        others: what the other ranks hold in the next collective of tensors, by rank.
    """

    name = "fake"
    device = torch.device("cpu")
    sums_sparse = True

    def __init__(self, world_size: int = 2, rank: int = 0) -> None:
        self.world_size, self.rank = world_size, rank
        self.group = self
        self.global_ranks = list(range(world_size))
        self.others: dict[int, torch.Tensor] = {}
        self.fails: Exception | None = None
        self.started = 0

    def _every(self, mine: torch.Tensor) -> list[torch.Tensor]:
        return [self.others.get(r, mine).clone() for r in range(self.world_size)]

    def all_reduce(self, storage: torch.Tensor) -> Any:
        self.started += 1
        if self.fails is None:
            storage.copy_(sum(self._every(storage)[1:], self._every(storage)[0]))
        return DoneWork(storage, error=self.fails)

    def allgather(self, into: list[list[torch.Tensor]], mine: list[torch.Tensor]) -> Any:
        self.started += 1
        for target, value in zip(into[0], self._every(mine[0]), strict=True):
            target.copy_(value)
        return DoneWork(error=self.fails)

    def all_gather_ints(self, value: int) -> list[int]:
        return [value] * self.world_size

    def all_gather_text(self, text: str) -> list[str]:
        return [text] * self.world_size


def done_future(value: Any) -> torch.futures.Future:
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(value)
    return future


def bits(tensor: torch.Tensor) -> list[int]:
    """The bytes of the elements, by which 0.0 and -0.0 differ."""
    flat = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return flat.contiguous().reshape(-1).view(torch.uint8).tolist()
