"""Reducing gradients bucket by bucket, by the mean or by what stands in its place."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from unified_ddp.errors import MisuseError
from unified_ddp.hooks.protocol import State
from unified_ddp.jax.reduction.axes import checked_axes, varying_axes
from unified_ddp.jax.reduction.mean import Strategy, mean
from unified_ddp.jax.reduction.packing import Turns, alike, unpack
from unified_ddp.plan import BucketPlan
from unified_ddp.ranks.texts import shortened

Reduce = Callable[[int, jax.Array, State, tuple[str, ...]], tuple[jax.Array, State]]
"""A comm hook, bound to a plan: takes a bucket's number, storage and state, and the axes; returns the reduced storage
and the new state. Pure: what it remembers of a bucket on a replica comes and goes as state."""


def require_local(plan: BucketPlan, grads: Sequence[jax.Array], axes: Sequence[str]) -> None:
    """Raises MisuseError if the types of gradients say that they are the same on every replica.

    Under `shard_map(check_vma=True)` such gradients are sums over the replicas already (or means, or zeros): a second
    reduction of a sum would be wrong by a factor of the number of replicas.
    """
    checked = checked_axes(axes)
    reduced = [repr(spec.name) for spec, grad in zip(plan.params, grads, strict=True) if checked - varying_axes(grad)]
    if reduced:
        raise MisuseError(
            f"the gradient of {shortened(reduced, 1)} does not vary over the mapped axis {', '.join(map(repr, axes))}: "
            "under shard_map(check_vma=True) JAX has already summed the gradients of replicated params, or they were "
            "reduced before. Take them with ddp.value_and_grad, or mark the params with ddp.varying(params) before "
            "jax.grad. If they really are local values, such as zeros, mark them with ddp.varying(grads)."
        )


def reduce_buckets(
    plan: BucketPlan,
    grads: Sequence[jax.Array],
    axes: tuple[str, ...],
    strategy: Strategy,
    reduce: Reduce | None = None,
    states: Sequence[State] = (),
) -> tuple[list[jax.Array], list[State]]:
    """Returns the mean over the axes of local gradients, both in the order of `plan.params`, and the new states.

    `reduce`, with one state a bucket, takes the place of the mean and its strategy.

    Raises:
        MisuseError: there is a comm hook, and gradients of one bucket vary over different axes by type.
    """
    reduced: list[Any] = [None] * len(grads)
    new_states = list(states)
    turns = Turns()
    for index, bucket in enumerate(plan.buckets):
        local = [grads[i] for i in bucket.params]
        if reduce is None:
            means = mean(local, axes, strategy, turns)
        else:
            _require_alike(local, [plan.params[i].name for i in bucket.params])
            storage, new_states[index] = reduce(index, turns.pack(local), states[index], axes)
            means = unpack(turns.reduced(storage), local)
        for i, gradient in zip(bucket.params, means, strict=True):
            reduced[i] = gradient
    return reduced, new_states


def _require_alike(local: Sequence[jax.Array], names: Sequence[str]) -> None:
    first, *others = alike(local)
    if others:
        one, other = first[0], others[0][0]
        raise MisuseError(
            f"a comm hook gets a bucket as one array, but the gradient of '{names[one]}' varies over the mapped axes "
            f"{sorted(varying_axes(local[one]))} and that of '{names[other]}', in the same bucket, over "
            f"{sorted(varying_axes(local[other]))}. Reduce those that are split over a model axis by a wrapper of "
            "their own (trainable=), or leave that axis to the compiler (axis_names= of jax.shard_map)"
        )
