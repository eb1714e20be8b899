"""Bucket plans: which parameters are reduced together, in which order, and where each lies in its storage."""

import json
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from numbers import Real
from typing import Any

from unified_ddp._core import BucketPlan, BucketSpec, ParamSpec, itemsize_of, plan_buckets, schema_fingerprint
from unified_ddp.errors import PlanError

__all__ = [
    "DEFAULT_BUCKET_CAP_MB",
    "DEFAULT_FIRST_BUCKET_BYTES",
    "MIB",
    "BucketPlan",
    "BucketSpec",
    "ParamSpec",
    "bucket_caps",
    "initial_plan",
    "itemsize_of",
    "plan_buckets",
    "plan_from_json",
    "plan_in_ready_order",
    "plan_to_json",
    "rebuilt_plan",
    "schema_fingerprint",
]

MIB = 1024 * 1024
DEFAULT_BUCKET_CAP_MB = 25
DEFAULT_FIRST_BUCKET_BYTES = MIB
"""The first bucket is small by default, so that the first all-reduce starts early."""

_FORMAT = "unified_ddp.plan.1"


def bucket_caps(bucket_cap_mb: float | None = None, bucket_cap_mb_list: Sequence[float] | None = None) -> list[int]:
    """Returns bucket caps in bytes, in launch order; the last one repeats.

    Args:
        bucket_cap_mb: cap in MiB; None means 25 MiB after a first bucket of 1 MiB.
        bucket_cap_mb_list: one cap in MiB a bucket; goes before `bucket_cap_mb`.

    Raises:
        TypeError: a cap is not a number, or `bucket_cap_mb_list` no sequence.
        ValueError: a cap is not positive and finite, or the list is empty.
    """
    if bucket_cap_mb_list is not None:
        if isinstance(bucket_cap_mb_list, str | bytes) or not isinstance(bucket_cap_mb_list, Iterable):
            raise TypeError(f"bucket_cap_mb_list is a sequence of numbers of MiB, not {bucket_cap_mb_list!r}")
        caps = [_cap_bytes("bucket_cap_mb_list", cap) for cap in bucket_cap_mb_list]
        if not caps:
            raise ValueError("bucket_cap_mb_list is empty; give at least one cap in MiB, or None")
        return caps
    if bucket_cap_mb is not None:
        return [_cap_bytes("bucket_cap_mb", bucket_cap_mb)]
    return [DEFAULT_FIRST_BUCKET_BYTES, DEFAULT_BUCKET_CAP_MB * MIB]


def _cap_bytes(argument: str, cap: float) -> int:
    if not _is_number(cap):
        raise TypeError(f"{argument} takes numbers of MiB, not {cap!r} of type {type(cap).__name__}")
    if not 0 < cap < float("inf"):
        raise ValueError(f"{argument} takes positive, finite numbers of MiB, not {cap!r}")
    return max(int(min(cap * MIB, sys.maxsize)), 1)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def plan_in_ready_order(
    params: Sequence[ParamSpec], caps: Sequence[int], order: Iterable[int] | None = None
) -> BucketPlan:
    """Plans buckets in the order in which gradients become ready.

    Args:
        params: in registration order.
        caps: bytes, from `bucket_caps`.
        order: indices into `params` as their gradients became ready; None assumes the reverse of registration,
            as the last layers' gradients come first.
    """
    ready = list(order) if order is not None else list(range(len(params)))[::-1]
    return plan_buckets(list(params), list(caps), order=ready)


def initial_plan(specs: Sequence[ParamSpec], caps: Sequence[int], delayed: Collection[int] = ()) -> BucketPlan:
    """Plans buckets before an order was observed: filled in registration order, launched in reverse.

    Args:
        specs: the parameters, in registration order.
        caps: bytes, from `bucket_caps`.
        delayed: indices of parameters that get buckets of their own, at the end.
    """
    return _with_delayed(specs, delayed, lambda now: plan_buckets(now, list(caps), reverse=True))


def rebuilt_plan(
    specs: Sequence[ParamSpec], caps: Sequence[int], order: Sequence[int], delayed: Collection[int] = ()
) -> BucketPlan:
    """Plans buckets in the observed order, a permutation of all parameters; otherwise as `initial_plan`."""
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


def plan_to_json(plan: BucketPlan) -> str:
    """Returns the plan as JSON; `plan_from_json` gives an equal plan with the same fingerprint."""
    params = [
        {
            "name": p.name,
            "shape": p.shape,
            "dtype": p.dtype,
            "strides": p.strides,
            "device": p.device,
            "trainable": p.trainable,
            "sparse": p.sparse,
        }
        for p in plan.params
    ]
    names = [p.name for p in plan.params]
    buckets = [{"params": [names[i] for i in b.params], "cap": b.cap} for b in plan.buckets]
    head: dict[str, Any] = {"format": _FORMAT, "fingerprint": f"{plan.fingerprint:016x}"}
    return json.dumps({**head, "params": params, "buckets": buckets})


def plan_from_json(text: str) -> BucketPlan:
    """Returns the plan that `plan_to_json` wrote.

    Raises:
        PlanError: the text is not such a plan, or its fingerprint does not fit its content.
    """
    try:
        data = json.loads(text)
        if data["format"] != _FORMAT:
            raise PlanError(f"the plan has format {data['format']!r}; this version reads {_FORMAT!r}")
        params = [ParamSpec(**fields) for fields in data["params"]]
        index = {p.name: i for i, p in enumerate(params)}
        buckets = [[index[name] for name in bucket["params"]] for bucket in data["buckets"]]
        plan = BucketPlan(params, buckets, caps=[bucket["cap"] for bucket in data["buckets"]])
        written = int(data["fingerprint"], 16)
    except PlanError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PlanError(f"this is not a bucket plan written by plan_to_json: {error!r}") from error
    if plan.fingerprint != written:
        raise PlanError(
            f"the plan's fingerprint is {plan.fingerprint:016x}, but {written:016x} was written with it: "
            "it was changed after it was written; make it anew"
        )
    return plan
