"""What a wrong reduction looks like: tries the known ways to go wrong on the numbers themselves."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class StepEvidence:
    """One side's gradients of one step, each list by rank.

    Attributes:
        reduced: after the reduction.
        local: before it.
        previous: before it, one step earlier; empty in the first step.
    """

    reduced: Sequence[Arrays]
    local: Sequence[Arrays]
    previous: Sequence[Arrays]


def explain(evidence: StepEvidence, params: Sequence[str], k: float) -> str:
    """Returns in words which known fault gives exactly these reduced gradients, for all of `params` on all ranks."""
    if any(not np.isfinite(rank[name]).all() for rank in (*evidence.reduced, *evidence.local) for name in params):
        return "there are NaN or infinite gradients, so nothing can be said about their reduction"
    for reason, predicted in _hypotheses(evidence, params):
        by_rank = zip(evidence.reduced, predicted, strict=True)
        if all(_agrees(actual[name], guess[name], k) for actual, guess in by_rank for name in params):
            return reason
    return "this is none of the known faults"


def _hypotheses(evidence: StepEvidence, params: Sequence[str]) -> Iterator[tuple[str, list[Arrays]]]:
    """Gives each known fault in words, and the gradients by rank to which it would lead."""
    local = [_wide(rank, params) for rank in evidence.local]
    size = len(local)
    total = _sum(local)
    yield "every rank holds its own local gradients: they were not reduced", local
    yield f"this is the sum over ranks, {size} times the mean", [total] * size
    for rank in range(size):
        others = [local[other] for other in range(size) if other != rank]
        if evidence.previous:
            stale = _scaled(_sum([*others, _wide(evidence.previous[rank], params)]), 1 / size)
            yield f"rank {rank} contributed its gradients of the step before", [stale] * size
        zeros = {name: np.zeros_like(array) for name, array in local[rank].items()}
        yield f"rank {rank} contributed nothing (zeros)", [_scaled(_sum([*others, zeros]), 1 / size)] * size


def _wide(arrays: Arrays, params: Sequence[str]) -> Arrays:
    return {name: arrays[name].astype(np.float64) for name in params}


def _sum(ranks: Sequence[Arrays]) -> Arrays:
    return {name: np.sum([rank[name] for rank in ranks], axis=0) for name in ranks[0]}


def _scaled(arrays: Arrays, factor: float) -> Arrays:
    return {name: array * factor for name, array in arrays.items()}


def _agrees(actual: np.ndarray, predicted: np.ndarray, k: float) -> bool:
    return bool(np.abs(actual - predicted).max(initial=0.0) <= k * np.abs(predicted).max(initial=0.0))
