"""What the sum over ranks is made of where it is not to be the mean: a plain sum, or a mean weighted by rank."""

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist

from unified_ddp.errors import ReductionError
from unified_ddp.ranks.texts import ranks_text
from unified_ddp.torch.reduction.sparse import SparseBucketStorage
from unified_ddp.torch.reduction.storage import BucketStorage
from unified_ddp.torch.reduction.transport import ProcessGroupTransport

__all__ = ["REDUCTIONS", "Scaling", "SumScaling", "WeightedScaling", "make_scaling"]

REDUCTIONS = ("mean", "sum", "weighted_mean")


class Scaling(Protocol):
    """Factors on a rank's gradients before they are summed over ranks."""

    def next_iteration(self) -> None:
        """Hears of a synchronising forward."""

    def begin(self) -> None:
        """Starts a reduction of all buckets."""

    def exchange(self, joined: bool = False) -> None:
        """Starts what communication it needs; `joined`: this rank only takes part with zeros."""

    def factor(self) -> float:
        """Returns the factor on every gradient of this rank; 0 takes them for zeros, whatever they are."""

    def adjust(self, storage: BucketStorage | SparseBucketStorage) -> None:
        """Changes a packed bucket before it is reduced."""

    def end(self) -> None:
        """Hears that all buckets are reduced."""

    def take_over(self, other: Any, numbers: Mapping[int, int]) -> None:
        """Takes the state of a scaling of the same kind; `numbers` gives our number for its parameters."""


def make_scaling(reduction: str, transport: ProcessGroupTransport, touched: Callable[[int], bool]) -> Scaling | None:
    """Returns the scaling for one of `REDUCTIONS`; None is the mean, which needs none.

    Args:
        reduction: the constructor's argument.
        transport: the ranks.
        touched: says whether a parameter got a gradient that is not reduced yet.
    """
    if reduction == "sum":
        return SumScaling(transport, touched)
    return WeightedScaling(transport) if reduction == "weighted_mean" else None


class SumScaling:
    """The sum over ranks.

    A mean leaves equal values unchanged, a sum does not: what `.grad` held before counts once, as it is reduced
    already. So it is divided by the world size: before this rank adds to it, or, if it adds nothing, when it is packed.
    """

    def __init__(self, transport: ProcessGroupTransport, touched: Callable[[int], bool]) -> None:
        self._transport = transport
        self._touched = touched
        self.shared: set[int] = set()
        """Parameters whose gradients were divided and are not reduced yet."""

    @property
    def share(self) -> float:
        """This rank's share of what is reduced already."""
        return 1.0 / self._transport.world_size

    def next_iteration(self) -> None:
        """Nothing is kept."""

    def begin(self) -> None:
        """Nothing to start."""

    def exchange(self, joined: bool = False) -> None:
        """Nothing to exchange."""

    def factor(self) -> float:
        """Returns 1."""
        return 1.0

    def adjust(self, storage: BucketStorage | SparseBucketStorage) -> None:
        """Leaves this rank's share of gradients that it has not touched since they were reduced."""
        for position, param in enumerate(storage.spec.params):
            if not self._touched(param) and param not in self.shared and storage.gradient(position) is not None:
                storage.views[position].mul_(self.share)

    def end(self) -> None:
        """What is divided is reduced."""
        self.shared.clear()

    def take_over(self, other: "SumScaling", numbers: Mapping[int, int]) -> None:
        """Takes what was divided."""
        self.shared = {numbers[param] for param in other.shared if param in numbers}


class WeightedScaling:
    """The sum over ranks of weight times gradient, divided by the sum of the weights."""

    def __init__(self, transport: ProcessGroupTransport) -> None:
        self._transport = transport
        self._weight: float | None = None
        self._used = False
        self._factor: float | None = None
        self._gathering: tuple[torch.Tensor, dist.Work] | None = None

    def set_weight(self, weight: Any) -> None:
        """Takes this rank's weight for the iteration under way, or, before its forward, for the next.

        Raises:
            TypeError, ValueError: it is not one finite number that is not negative.
        """
        if isinstance(weight, torch.Tensor) and weight.numel() == 1:
            weight = weight.item()
        if isinstance(weight, bool) or not isinstance(weight, numbers.Real):
            raise TypeError(f"a weight is a number, not {weight!r} of type {type(weight).__name__}")
        try:
            weight = float(weight)
        except OverflowError:
            weight = math.inf
        if not 0 <= weight < math.inf:
            raise ValueError(f"a weight is finite and not negative, not {weight!r}")
        self._weight, self._used = weight, False

    def next_iteration(self) -> None:
        """Forgets a weight that was used, so that none is taken for another iteration's by mistake."""
        if self._used:
            self._weight, self._used = None, False

    def begin(self) -> None:
        """Forgets the other ranks' weights."""
        self._factor, self._gathering = None, None

    def exchange(self, joined: bool = False) -> None:
        """Starts gathering all weights, 8 bytes a rank; a joined rank's is 0, a missing one NaN."""
        weight = 0.0 if joined else math.nan if self._weight is None else self._weight
        self._used |= not joined
        mine = torch.tensor([weight], dtype=torch.float64, device=self._transport.device)
        every = mine.new_empty(self._transport.world_size)
        self._gathering = (every, self._transport.group.allgather([list(every.split(1))], [mine]))

    def factor(self) -> float:
        """Returns this rank's weight divided by the sum of all; waits for the other ranks' at the first call.

        Raises:
            ReductionError: on all ranks, if some rank has no weight, or all are 0.
        """
        if self._factor is None:
            if self._gathering is None:
                self.exchange()
            assert self._gathering is not None
            every, work = self._gathering
            work.wait()
            self._factor = self._share(every.tolist())
        return self._factor

    def adjust(self, storage: BucketStorage | SparseBucketStorage) -> None:
        """A weighted mean leaves equal values unchanged."""

    def end(self) -> None:
        """Nothing to keep."""

    def take_over(self, other: "WeightedScaling", numbers: Mapping[int, int]) -> None:
        """Takes the weight."""
        self._weight, self._used = other._weight, other._used

    def _share(self, weights: list[float]) -> float:
        missing = [rank for rank, weight in enumerate(weights) if math.isnan(weight)]
        if missing:
            raise ReductionError(
                f"no weight was set for this iteration on {ranks_text(missing)}, so nothing was reduced. "
                "With reduction='weighted_mean' call "
                "set_weight() on every rank before each iteration's backward pass"
            )
        total = sum(weights)
        if math.isinf(total):
            raise ReductionError(
                f"the weights of all ranks, {weights}, add up to more than a float holds, and nothing was reduced. "
                "Scale them down"
            )
        if total == 0:
            raise ReductionError(
                "the weights of all ranks are 0, so there is nothing to average and nothing was reduced. Give a "
                "positive weight on some rank, or leave this iteration out on all ranks"
            )
        return weights[self._transport.rank] / total
