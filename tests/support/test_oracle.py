"""The oracle itself."""

from collections.abc import Callable
from typing import Any

import torch

from support.oracle import mean_over_ranks


def case_helper(rank: int, world_size: int) -> None:
    like = torch.zeros(3)
    assert mean_over_ranks(None, like) is None
    mean = mean_over_ranks(torch.ones(3) if rank else None, like)
    assert mean is not None
    assert mean.tolist() == [0.5, 0.5, 0.5]


def test_the_oracle_counts_missing_gradients_as_zero(world: Callable[[int], Any]) -> None:
    world(2).run(case_helper)
