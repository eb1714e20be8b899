"""What a wrong reduction looks like: tries the known ways to go wrong on the numbers themselves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["StepEvidence", "explain"]

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
    for reason, predict in _hypotheses(evidence):
        if all(
            _agrees(evidence.reduced[rank][name], predict(rank, name), k)
            for rank in _ranks(evidence)
            for name in params
        ):
            return reason
    return "this is none of the known faults"


def _ranks(evidence: StepEvidence) -> range:
    return range(len(evidence.reduced))


def _hypotheses(evidence: StepEvidence) -> list[tuple[str, Callable[[int, str], np.ndarray]]]:
    size = len(evidence.local)

    def local(rank: int, name: str) -> np.ndarray:
        return evidence.local[rank][name].astype(np.float64)

    def mean(name: str, replaced: int, by: Callable[[int, str], np.ndarray]) -> np.ndarray:
        return sum((by if rank == replaced else local)(rank, name) for rank in range(size)) / np.float64(size)

    def stale(rank: int, name: str) -> np.ndarray:
        return evidence.previous[rank][name].astype(np.float64)

    def nothing(rank: int, name: str) -> np.ndarray:
        return np.zeros(evidence.local[rank][name].shape)

    found: list[tuple[str, Callable[[int, str], np.ndarray]]] = [
        ("every rank holds its own local gradients: they were not reduced", local),
        (f"this is the sum over ranks, {size} times the mean", lambda _, name: size * mean(name, -1, local)),
    ]
    for rank in range(size):
        if evidence.previous:
            found.append(
                (f"rank {rank} contributed its gradients of the step before", lambda _, n, r=rank: mean(n, r, stale))
            )
        found.append((f"rank {rank} contributed nothing (zeros)", lambda _, n, r=rank: mean(n, r, nothing)))
    return found


def _agrees(actual: np.ndarray, predicted: np.ndarray, k: float) -> bool:
    return bool(np.abs(actual - predicted).max(initial=0.0) <= k * np.abs(predicted).max(initial=0.0))
