"""Factors of one rank, with the other ranks' answers given: the units under the programs of test_scaling."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from support.buckets import DoneWork, FakeRanks
from torch import nn

from unified_ddp.errors import MisuseError, ReductionError
from unified_ddp.ranks.progress import Progress
from unified_ddp.torch.reduction.scaling import SCALINGS
from unified_ddp.torch.reduction.storage import LocalGradients

NAN, INF = float("nan"), float("inf")


def scaling(name: str, ranks: FakeRanks | None = None, touched: set[int] | None = None, params: int = 3) -> Any:
    ranks = ranks or FakeRanks()
    held = [nn.Parameter(torch.ones(2)) for _ in range(params)]
    came = touched if touched is not None else set()
    progress = Progress(ranks, lambda: None)
    made = SCALINGS[name](ranks, progress, held, LocalGradients(), came.__contains__)
    made.handles, made.held = made.register(), held
    return made


# --- the mean


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_mean(world_size: int) -> None:
    mean = scaling("mean", FakeRanks(world_size))
    share = mean.begin()
    share.exchange()
    assert mean.scale(share, hooked=False) == 1 / world_size
    assert mean.scale(share, hooked=True) == 1.0  # a comm hook divides by itself
    assert mean.handles == []
    assert mean.begin(joined=True).factor() == 1 / world_size


def test_the_mean_over_ranks_with_inputs() -> None:
    mean = scaling("mean", FakeRanks(4))
    work = DoneWork(torch.tensor([3]))
    mean.divide_by_joined(work)
    assert mean.begin().factor() == 1 / 3
    assert mean.begin().factor() == 1 / 3  # until another sum, or none, is given
    assert work.waits == 1
    mean.divide_by_joined(None)
    assert mean.begin().factor() == 1 / 4


def test_a_count_of_ranks_that_fails_is_named() -> None:
    mean = scaling("mean")
    mean.divide_by_joined(DoneWork(error=RuntimeError("connection closed")))
    with pytest.raises(ReductionError, match="the count of ranks with inputs, failed on rank 0"):
        mean.begin()


# --- the sum


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_sum(world_size: int) -> None:
    total = scaling("sum", FakeRanks(world_size))
    share = total.begin()
    assert total.scale(share, hooked=False) == 1.0
    assert total.scale(share, hooked=True) == world_size  # hooks average


def test_what_is_reduced_already_counts_once() -> None:
    touched: set[int] = set()
    total = scaling("sum", FakeRanks(4), touched)
    a, b, c = total.held
    a.grad, b.grad = torch.full((2,), 8.0), torch.full((2,), 8.0)
    for p in (a, c):
        p.sum().backward()
    touched |= {0, 2}
    assert a.grad.tolist() == [3.0, 3.0]  # 8 / 4 + 1
    a.sum().backward()
    assert a.grad.tolist() == [4.0, 4.0]  # divided once
    assert c.grad.tolist() == [1.0, 1.0]  # nothing was there
    views = [p.grad.clone() for p in (a, b, c)]
    total.adjust([0, 1, 2], views, ())
    assert [v[0].item() for v in views] == [4.0, 2.0, 1.0]  # b got nothing: its part is left


def test_what_an_exception_left_divided_is_not_divided_again() -> None:
    total = scaling("sum", FakeRanks(2))
    param = total.held[0]
    param.grad = torch.full((2,), 8.0)

    def fail(_: Any) -> None:
        raise ZeroDivisionError

    handle = param.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        param.sum().backward()
    handle.remove()
    assert param.grad.tolist() == [4.0, 4.0]
    view = param.grad.clone()
    total.adjust([0], [view], ())
    assert view.tolist() == [4.0, 4.0]
    param.sum().backward()
    assert param.grad.tolist() == [5.0, 5.0]
    total.end()
    total.adjust([0], [view], ())
    assert view.tolist() == [2.0, 2.0]


def test_a_missing_gradient_stays_negative_zero() -> None:
    view = torch.full((2,), -0.0)
    scaling("sum").adjust([1], [view], {0})
    assert torch.signbit(view).all()


def test_autograd_grad_divides_nothing() -> None:
    total = scaling("sum")
    param = total.held[0]
    param.grad = torch.full((2,), 8.0)
    torch.autograd.grad(param.sum(), param)
    assert param.grad.tolist() == [8.0, 8.0]


def test_the_sum_is_taken_over_by_parameter() -> None:
    before, after = scaling("sum"), scaling("sum")
    for p in before.held:
        p.grad = torch.ones(2)
        p.sum().backward()
    after.take_over(before, {0: 2, 1: 0})  # the third one is gone
    views = [torch.ones(2) for _ in range(3)]
    after.adjust([0, 1, 2], views, ())
    assert [v[0].item() for v in views] == [1.0, 0.5, 1.0]


# --- the weighted mean


@pytest.mark.parametrize(
    ("mine", "others", "factor"), [(1, [3], 0.25), (0, [3], 0.0), (2.5, [0, 2.5], 0.5), (1e308, [0], 1.0)]
)
def test_the_weighted_mean(mine: float, others: list[float], factor: float) -> None:
    ranks = FakeRanks(1 + len(others))
    ranks.others = {i + 1: torch.tensor([w], dtype=torch.float64) for i, w in enumerate(others)}
    weighted = scaling("weighted_mean", ranks)
    weighted.set_weight(mine)
    share = weighted.begin()
    share.exchange()
    assert weighted.scale(share, hooked=False) == factor
    assert weighted.scale(share, hooked=True) == factor * ranks.world_size
    assert ranks.started == 1  # once a pass


def test_a_joined_rank_weighs_nothing_and_keeps_its_weight() -> None:
    ranks = FakeRanks()
    ranks.others = {1: torch.tensor([4.0], dtype=torch.float64)}
    weighted = scaling("weighted_mean", ranks)
    weighted.set_weight(4)
    assert weighted.begin(joined=True).factor() == 0.0
    weighted.next_iteration()
    assert weighted.begin().factor() == 0.5


@pytest.mark.parametrize(
    ("mine", "other", "message"),
    [
        (None, 1.0, r"no weight was set for this iteration on rank 0, so"),
        (1.0, NAN, r"on rank 1, so nothing was reduced.* call set_weight\(\) on every rank"),
        (None, NAN, r"on ranks 0, 1"),
        (0, 0.0, "the weights of all ranks are 0"),
        (1.5e308, 1.5e308, r"\[1.5e\+308, 1.5e\+308\], add up to more than a float holds.* Scale them down"),
    ],
)
def test_weights_that_make_no_mean(mine: float | None, other: float, message: str) -> None:
    ranks = FakeRanks()
    ranks.others = {1: torch.tensor([other], dtype=torch.float64)}
    weighted = scaling("weighted_mean", ranks)
    if mine is not None:
        weighted.set_weight(mine)
    with pytest.raises(ReductionError, match=message):
        weighted.begin().factor()


def test_a_weight_lasts_one_iteration() -> None:
    weighted = scaling("weighted_mean")
    weighted.set_weight(2)
    weighted.next_iteration()  # set before the forward
    assert weighted.begin().factor() == 0.5
    assert weighted.begin().factor() == 0.5  # another pass of it
    weighted.next_iteration()
    with pytest.raises(ReductionError, match="no weight was set"):
        weighted.begin().factor()


def test_a_weight_is_taken_over() -> None:
    before, after = scaling("weighted_mean"), scaling("weighted_mean")
    before.set_weight(3)
    after.take_over(before, {})
    assert after.begin().factor() == 0.5


@pytest.mark.parametrize(
    "weight", [3, 0, 2.5, Fraction(1, 4), np.float32(2), np.int64(2), torch.tensor(2), torch.tensor([[1.5]])], ids=repr
)
def test_what_can_be_a_weight(weight: Any) -> None:
    weighted = scaling("weighted_mean")
    weighted.set_weight(weight)
    assert weighted._weight == float(weight)


@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        (-1, ValueError, "finite and not negative, not -1.0"),
        (NAN, ValueError, "not nan"),
        (INF, ValueError, "not inf"),
        (10**400, ValueError, "not inf"),
        (torch.tensor(-2.0), ValueError, "not -2.0"),
        ("3", TypeError, "a weight is a number, not '3' of type str"),
        (True, TypeError, "not True of type bool"),
        (torch.tensor(True), TypeError, "not True of type bool"),
        (None, TypeError, "not None of type NoneType"),
        (1j, TypeError, "of type complex"),
        (torch.ones(2), TypeError, "of type Tensor"),
    ],
    ids=repr,
)
def test_what_cannot_be_a_weight(weight: Any, error: type[Exception], message: str) -> None:
    weighted = scaling("weighted_mean")
    with pytest.raises(error, match=message):
        weighted.set_weight(weight)
    assert weighted._weight is None


@pytest.mark.parametrize("name", ["mean", "sum"])
def test_a_weight_for_another_reduction(name: str) -> None:
    with pytest.raises(MisuseError, match=rf"reduction='weighted_mean'\); this one has reduction='{name}'"):
        scaling(name).set_weight(1)
