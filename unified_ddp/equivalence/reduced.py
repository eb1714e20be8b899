"""The reduced rung: gradients after the real reduction, each side beside its own oracle, and both beside each other.

The oracle is the mean over ranks of the gradients that plain autograd gives on each rank's shard. A side that is off
its own oracle reduces wrongly; sides that differ though each is on its own oracle differ as models.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from unified_ddp.equivalence.batches import shards
from unified_ddp.equivalence.judge import constant_ratio, hint, judged
from unified_ddp.equivalence.mapping.mapping import Mapping
from unified_ddp.equivalence.observe import Key, Observer
from unified_ddp.equivalence.results import BucketRow, BucketTime, Finding, Verdict
from unified_ddp.equivalence.side import Arrays, Reduction
from unified_ddp.equivalence.tolerance import Allowance, measure

_EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


class Reduced:
    """What the reduced rung found: findings, the plan's buckets, and when each was reduced."""

    def __init__(
        self, findings: list[Finding], buckets: tuple[BucketRow, ...], timeline: tuple[BucketTime, ...]
    ) -> None:
        self.findings, self.buckets, self.timeline = findings, buckets, timeline


def compare_reduced(
    observers: tuple[Observer, Observer],
    values: tuple[Arrays, Arrays],
    batch: Any,
    ranks: int,
    dtype: str,
    seed: int,
) -> Reduced:
    """Runs both sides' real layers on equal shards of one batch and compares.

    Args:
        observers: the sides.
        values: their weights.
        batch: the first side's.
        ranks: number of shards.
        dtype: of the run.
        seed: of the jitter by which noise is learnt, on the first shard.
    """
    mapping = observers[0].mapping
    parts = [[observer.batch(shard) for shard in shards(batch, ranks)] for observer in observers]
    first = observers[0].side.reduce(values[0], parts[0], dtype)
    second = observers[1].side.reduce(values[1], parts[1], dtype, _carried_buckets(first, mapping))
    noise = []
    for observer, own, shares in zip(observers, values, parts, strict=True):
        at = observer.observe(own, shares[0], dtype)
        noise.append(observer.noise(own, shares[0], dtype, at, seed)[0])
    findings = []
    for observer, reduction, learnt in zip(observers, (first, second), noise, strict=True):
        findings += own_oracle(observer, reduction, learnt, dtype)
    findings += _sides(observers, first, second, noise, dtype)
    return Reduced(findings, _rows(first, mapping, observers[0], dtype), (*first.timeline, *second.timeline))


def _carried_buckets(first: Reduction, mapping: Mapping) -> list[list[str]] | None:
    """The first side's buckets by the second's names: a tensor goes with the last of those it is made of."""
    if not first.buckets:
        return None
    index = {name: i for i, names in enumerate(first.buckets) for name in names}
    buckets: list[list[str]] = [[] for _ in first.buckets]
    for name, sources in mapping.sources.items():
        places = [index[source.name] for source in sources if source.name in index]
        if places:
            buckets[max(places)].append(name)
    return [names for names in buckets if names]


def own_oracle(observer: Observer, reduction: Reduction, noise: dict[Key, np.ndarray], dtype: str) -> list[Finding]:
    """Reduced gradients of each rank beside the exact mean of the ranks' plain gradients, and rank 0's bits."""
    ranks = len(reduction.local)
    buckets = {name: i for i, names in enumerate(reduction.buckets) for name in names}
    findings = []
    shared = [observer.pulled(grads) for grads in reduction.reduced]
    plain = [observer.pulled(grads) for grads in reduction.local]
    for name in shared[0]:
        terms = [_wide(grads[name]) for grads in plain]
        mean = np.sum(terms, axis=0) / ranks
        spread = (ranks + 2) * _EPSILON[dtype] * np.sum(np.abs(terms), axis=0) / ranks
        own = noise.get(("gradient", name), 0.0)
        bucket = _bucket_of(name, observer, buckets)
        for rank, grads in enumerate(shared):
            gap = measure(mean, _wide(grads[name]), Allowance(dtype, own, 0.0, extra=spread))
            bare = _finding(name, observer, Verdict.PASS, gap, rank, bucket)
            found = judged(bare, (_largest(plain), 0.0), f"{_cause(mean, grads[name], terms)}")
            if found.verdict is Verdict.DIFFERS:
                found = replace(found, ratio=constant_ratio(mean, _wide(grads[name])))
            if rank and found.verdict.ok and not _same_bits(grads[name], shared[0][name]):
                found = _finding(name, observer, Verdict.DIFFERS, gap, rank, bucket, "holds other bits than rank 0")
            findings.append(found)
    return findings


def _finding(
    name: str, observer: Observer, verdict: Verdict, gap: Any, rank: int, bucket: int | None, note: str = ""
) -> Finding:
    return Finding(
        "reduced",
        name,
        observer.mapping.counterparts(name),
        "gradient",
        verdict,
        gap,
        side=observer.side.framework,
        rank=rank,
        bucket=bucket,
        note=note,
    )


def _cause(mean: np.ndarray, reduced: np.ndarray, terms: Sequence[np.ndarray]) -> str:
    """The reduction's result is its oracle's times a number, or one rank's own gradient."""
    for rank, term in enumerate(terms):
        if np.linalg.norm((_wide(reduced) - term).ravel()) <= 1e-4 * np.linalg.norm(term.ravel()):
            return f"the reduction left rank {rank}'s own gradient"
    found = hint(mean, _wide(reduced))
    return (
        f"of its oracle (first) and the reduction (second): {found}" if found else "the reduction is off its own oracle"
    )


def _bucket_of(name: str, observer: Observer, buckets: dict[str, int]) -> int | None:
    if observer.is_first:
        return buckets.get(name)
    places = [buckets[n] for n in observer.mapping.counterparts(name) if n in buckets]
    return max(places, default=None)


def _sides(
    observers: tuple[Observer, Observer],
    first: Reduction,
    second: Reduction,
    noise: Sequence[dict[Key, np.ndarray]],
    dtype: str,
) -> list[Finding]:
    ours, theirs = observers[0].pulled(first.reduced[0]), observers[1].pulled(second.reduced[0])
    buckets = {name: i for i, names in enumerate(first.buckets) for name in names}
    largest = _largest([ours, theirs])
    findings = []
    for name in (name for name in ours if name in theirs):
        here, there = (learnt.get(("gradient", name), 0.0) for learnt in noise)
        gap = measure(ours[name], theirs[name], Allowance(dtype, here, there, of_all=largest))
        bare = Finding(
            "reduced",
            name,
            observers[0].mapping.counterparts(name),
            "gradient",
            Verdict.PASS,
            None if dtype == "float64" else gap,
            gap if dtype == "float64" else None,
            bucket=buckets.get(name),
        )
        findings.append(judged(bare, (largest, largest), hint(ours[name], theirs[name])))
    return findings


def _rows(first: Reduction, mapping: Mapping, observer: Observer, dtype: str) -> tuple[BucketRow, ...]:
    rows = []
    for index, names in enumerate(first.buckets):
        sizes = tuple(first.reduced[0][name].nbytes for name in names)
        others = tuple(dict.fromkeys(other for name in names for other in mapping.counterparts(name)))
        rows.append(BucketRow(index, names, others, sum(sizes), sizes))
    return tuple(rows)


def _largest(sets: Sequence[Arrays]) -> float:
    return max((float(np.max(np.abs(_wide(a)), initial=0.0)) for grads in sets for a in grads.values()), default=0.0)


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.array_equal(a, b, equal_nan=True))


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
