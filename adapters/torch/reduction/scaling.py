"""What the sum over ranks is made of: the mean, a plain sum, or a mean weighted by rank.

A `Scaling` lives as long as its reducer; what it settles for one pass is a `Share`.
"""

import math
import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from unified_ddp.errors import MisuseError, ReductionError
from unified_ddp.ranks.progress import Progress
from unified_ddp.ranks.texts import ranks_text
from unified_ddp.torch.options import REDUCTIONS
from unified_ddp.torch.reduction import autograd
from unified_ddp.torch.reduction.storage import LocalGradients
from unified_ddp.torch.reduction.transport import ProcessGroupTransport
from unified_ddp.weak import weak_call


class Share:
    """This rank's factor in one pass."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def exchange(self) -> None:
        """Starts what communication it needs, if that is not started yet."""

    def factor(self) -> float:
        """Returns the factor on every gradient of this rank; 0 takes them for zeros, whatever they are."""
        return self._factor


class MeanScaling:
    """The mean over ranks, all of them or, inside `join`, those that still have inputs.

    Args:
        transport: the ranks.
        progress: names waits in errors.
        params: whose gradients are reduced.
        local: this rank's gradients.
        touched: says whether a parameter, by number, got a gradient that is not reduced yet.
        settle: makes sure that all ranks are at this pass, before something is communicated.
    """

    def __init__(
        self,
        transport: ProcessGroupTransport,
        progress: Progress,
        params: Sequence[torch.Tensor],
        local: LocalGradients,
        touched: Callable[[int], bool],
        settle: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._progress = progress
        self._params = params
        self._local = local
        self._touched = touched
        self._settle = settle
        self._divisor: int | None = None
        self._join_work: dist.Work | None = None

    def divide_by_joined(self, work: dist.Work | None) -> None:
        """Takes the sum, under way, that says how many ranks have inputs; None divides by all ranks."""
        self._join_work = work
        if work is None:
            self._divisor = None

    def begin(self, joined: bool = False) -> Share:
        """Starts a pass. `joined`: this rank only takes part with zeros."""
        if self._join_work is not None:
            # Ranks that have not joined sum ones; the result is ready before the first gradient is packed.
            with self._progress.waiting(self._progress.pass_name, "the count of ranks with inputs"):
                self._join_work.wait()
            self._divisor = int(self._join_work.result()[0].item())
            self._join_work = None
        return self._share(joined)

    def _share(self, joined: bool) -> Share:
        return Share(1.0 / (self._divisor or self._transport.world_size))

    def scale(self, share: Share, hooked: bool) -> float:
        """Returns the factor on this rank's gradients before they are summed.

        Args:
            share: of the pass.
            hooked: a comm hook reduces, which divides by the number of ranks by itself.
        """
        return 1.0 if hooked else share.factor()

    def register(self) -> list[Any]:
        """Returns the handles of the hooks on parameters that it needs."""
        return []

    def next_iteration(self) -> None:
        """Hears of a synchronising forward."""

    def part(self, number: int) -> float:
        """Returns how much of what a parameter's gradient holds is to be reduced: it may hold the ranks' sum."""
        return 1.0

    def adjust(self, numbers: Sequence[int], views: Sequence[torch.Tensor], absent: Collection[int]) -> None:
        """Changes the packed gradients of a bucket before they are reduced.

        Args:
            numbers: of the bucket's parameters.
            views: their packed gradients.
            absent: positions that have none on this rank.
        """

    def end(self) -> None:
        """Hears that all buckets are reduced."""

    def take_over(self, other: Any, numbers: Mapping[int, int]) -> None:
        """Takes the state of a scaling of the same kind; `numbers` gives our number for its parameters."""

    def set_weight(self, weight: Any) -> None:
        """Refuses a weight, save in the weighted mean."""
        raise MisuseError(
            "set_weight() needs DistributedDataParallel(..., reduction='weighted_mean'); this one has "
            f"reduction={next(name for name, scaling in SCALINGS.items() if type(self) is scaling)!r}"
        )


class SumScaling(MeanScaling):
    """The sum over ranks.

    A mean leaves equal values unchanged, a sum does not: what `.grad` held before counts once, as it is reduced
    already. So it is divided by the world size: before this rank adds to it, or, if it adds nothing, when it is packed.
    """

    _shared: frozenset[int] = frozenset()
    """Parameters whose gradients were divided and are not reduced yet."""

    @property
    def _part(self) -> float:
        """This rank's part of what is reduced already."""
        return 1.0 / self._transport.world_size

    def _share(self, joined: bool) -> Share:
        return Share(1.0)

    def scale(self, share: Share, hooked: bool) -> float:
        """See `MeanScaling.scale`."""
        return share.factor() * (self._transport.world_size if hooked else 1)

    def register(self) -> list[Any]:
        """Divides what is in a `.grad` before a gradient is added to it."""
        before = weak_call(self._before_gradient)
        return [p.register_hook(lambda _grad, i=i: before(i)) for i, p in enumerate(self._params)]

    def _before_gradient(self, number: int) -> None:
        param = self._params[number]
        if self._touched(number) or number in self._shared or self._local.of(param) is None:
            return
        if autograd.accumulates(autograd.accumulate_grad_node(param)):
            self._local.scale(param, self._part)
            self._shared = self._shared | {number}

    def adjust(self, numbers: Sequence[int], views: Sequence[torch.Tensor], absent: Collection[int]) -> None:
        """Leaves this rank's part of gradients that it has not touched since they were reduced."""
        for position, (number, view) in enumerate(zip(numbers, views, strict=True)):
            if position not in absent and (part := self.part(number)) != 1.0:
                view.mul_(part)

    def part(self, number: int) -> float:
        """Returns this rank's part of a gradient that it has not touched since it was reduced."""
        return 1.0 if self._touched(number) or number in self._shared else self._part

    def end(self) -> None:
        """What is divided is reduced."""
        self._shared = frozenset()

    def take_over(self, other: "SumScaling", numbers: Mapping[int, int]) -> None:
        """Takes what was divided."""
        self._shared = frozenset(numbers[param] for param in other._shared if param in numbers)


class WeightedScaling(MeanScaling):
    """The sum over ranks of weight times gradient, divided by the sum of the weights."""

    _weight: float | None = None
    _used = False

    def scale(self, share: Share, hooked: bool) -> float:
        """See `MeanScaling.scale`."""
        return share.factor() * (self._transport.world_size if hooked else 1)

    def _share(self, joined: bool) -> Share:
        return _WeightedShare(self, joined)

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

    def take_over(self, other: "WeightedScaling", numbers: Mapping[int, int]) -> None:
        """Takes the weight."""
        self._weight, self._used = other._weight, other._used

    def gather(self, joined: bool) -> tuple[torch.Tensor, dist.Work]:
        """Starts gathering all weights, 8 bytes a rank; a joined rank's is 0, a missing one NaN."""
        self._settle()
        weight = 0.0 if joined else math.nan if self._weight is None else self._weight
        self._used |= not joined
        mine = torch.tensor([weight], dtype=torch.float64, device=self._transport.device)
        every = mine.new_empty(self._transport.world_size)
        return every, self._transport.group.allgather([list(every.split(1))], [mine])

    def part_of(self, weights: list[float]) -> float:
        """Returns this rank's weight divided by the sum of all.

        Raises:
            ReductionError: on all ranks, if some rank has no weight, or all are 0.
        """
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


class _WeightedShare(Share):
    def __init__(self, scaling: WeightedScaling, joined: bool) -> None:
        self._scaling, self._joined = scaling, joined
        self._gathering: tuple[torch.Tensor, dist.Work] | None = None
        self._known: float | None = None

    def exchange(self) -> None:
        if self._gathering is None:
            self._gathering = self._scaling.gather(self._joined)

    def factor(self) -> float:
        """Waits for the other ranks' weights at the first call."""
        if self._known is None:
            self.exchange()
            assert self._gathering is not None
            every, work = self._gathering
            work.wait()
            self._known = self._scaling.part_of(every.tolist())
        return self._known


SCALINGS = dict(zip(REDUCTIONS, (MeanScaling, SumScaling, WeightedScaling), strict=True))
"""By the constructor's argument `reduction`."""
