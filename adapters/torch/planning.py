"""Bucket plans of a torch module: torch's rules, with delayed parameters in buckets of their own at the end."""

import sys
from collections.abc import Callable, Collection, Sequence

from unified_ddp.plan import BucketPlan, ParamSpec, plan_buckets, plan_in_ready_order

__all__ = ["initial_plan", "rebuilt_plan"]


def initial_plan(specs: Sequence[ParamSpec], caps: Sequence[int], delayed: Collection[int] = ()) -> BucketPlan:
    """Plans the buckets of the first iteration: filled in registration order, launched in reverse."""
    return _with_delayed(specs, delayed, lambda now: plan_buckets(now, list(caps), reverse=True))


def rebuilt_plan(
    specs: Sequence[ParamSpec], caps: Sequence[int], order: Sequence[int], delayed: Collection[int] = ()
) -> BucketPlan:
    """Plans the buckets in the observed order, a permutation of all parameters."""
    now = [i for i in range(len(specs)) if i not in delayed]
    place = {index: position for position, index in enumerate(now)}
    ready = [place[i] for i in order if i not in delayed]
    return _with_delayed(specs, delayed, lambda some: plan_in_ready_order(some, caps, ready))


def _with_delayed(
    specs: Sequence[ParamSpec], delayed: Collection[int], plan: Callable[[list[ParamSpec]], BucketPlan]
) -> BucketPlan:
    if not delayed:
        return plan(list(specs))
    buckets: list[list[int]] = []
    caps: list[int] = []
    groups = [
        ([i for i in range(len(specs)) if i not in delayed], plan),
        (sorted(delayed), lambda late: plan_buckets(late, [sys.maxsize])),
    ]
    for indices, make in groups:
        for bucket in make([specs[i] for i in indices]).buckets if indices else ():
            buckets.append([indices[i] for i in bucket.params])
            caps.append(bucket.cap)
    return BucketPlan(list(specs), buckets, caps=caps)
