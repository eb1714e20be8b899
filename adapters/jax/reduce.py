"""Reducing gradients bucket by bucket: how a bucket becomes one or several all-reduces.

Measured on CPU: every operand of an all-reduce costs a round trip, of about 0.5 ms between processes and 0.1 ms in one,
so small gradients are packed; but that takes up to 0.2 times longer to compile, and in one process it is left to users.
"""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from unified_ddp.errors import MisuseError
from unified_ddp.hooks.protocol import BucketLayout, SharedHook, State
from unified_ddp.jax.axes import axis_size, checked_axes, varying_axes
from unified_ddp.jax.hooks import CommHook, JaxBucket, run_hook
from unified_ddp.jax.packing import alike, pack, unpack
from unified_ddp.jax.shared_hooks import run_shared_hook
from unified_ddp.plan import MIB, BucketPlan
from unified_ddp.ranks.texts import shortened

__all__ = ["LARGE_LEAF_BYTES", "Strategy", "default_strategy", "reduce_buckets", "require_local"]

Strategy = Literal["flat", "tuple"]

LARGE_LEAF_BYTES = 4 * MIB
"""A gradient of at least this size is reduced where it lies: a copy would cost more than one more operand, some 2 ms
between processes on CPUs. Of 1, 4 and any MiB, 4 gave the fastest steps of a transformer and a ResNet."""

PACKED_BYTES = 8 * MIB
"""No more than this is packed into one array: of 2 to 25 MiB, 8 and 12 gave the fastest steps of the transformer, as
the same memory is used again. On GPUs, XLA's combiner puts such arrays together."""


def check_strategy(strategy: str | None) -> None:
    """Raises ValueError unless `strategy` is a known one or None."""
    if strategy is not None and strategy not in get_args(Strategy):
        raise ValueError(f"strategy takes {', '.join(map(repr, get_args(Strategy)))} or None, not {strategy!r}")


def default_strategy() -> Strategy:
    """Returns "flat" when the replicas are in several processes, "tuple" within one."""
    return "flat" if jax.process_count() > 1 else "tuple"


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
    hook: CommHook | SharedHook | None = None,
    layouts: Sequence[BucketLayout] = (),
    states: Sequence[State] = (),
) -> tuple[list[jax.Array], list[State]]:
    """Returns the mean over the axes of local gradients, both in the order of `plan.params`, and the hook's new states.

    Args:
        plan: the buckets.
        grads: this replica's gradients.
        axes: to reduce over.
        strategy: of the mean without a hook.
        hook: reduces in its place.
        layouts: one a bucket, for a shared hook.
        states: of a shared hook, one a bucket.

    Raises:
        MisuseError: there is a hook, and gradients of one bucket vary over different axes by type.
    """
    size = axis_size(axes)
    reduced: list[Any] = [None] * len(grads)
    new_states = list(states)
    turns = _Turns()
    for index, bucket in enumerate(plan.buckets):
        local = [grads[i] for i in bucket.params]
        if hook is None:
            means = _mean(local, axes, size, strategy, turns)
        else:
            specs = tuple(plan.params[i] for i in bucket.params)
            names = tuple(spec.name for spec in specs)
            _require_alike(local, names)
            flat = turns.pack(local)
            if isinstance(hook, SharedHook):
                flat, new_states[index] = run_shared_hook(hook, states[index], layouts[index], flat, axes)
            else:
                last = index == len(plan.buckets) - 1
                flat = run_hook(hook, JaxBucket(flat, index, last, axes, size, names, bucket, specs))
            means = unpack(turns.reduced(flat), local)
        for i, mean in zip(bucket.params, means, strict=True):
            reduced[i] = mean
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


class _Turns:
    """Packs bucket after bucket, on CPUs no more than `PACKED_BYTES` at once: the next waits for the one before."""

    def __init__(self) -> None:
        self._last: jax.Array | None = None
        self._packed = 0

    def pack(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """Returns the arrays, of one dtype, as one flat array."""
        size = sum(array.nbytes for array in arrays)
        waits = self._packed + size > PACKED_BYTES
        self._packed = size if waits else self._packed + size
        return pack(arrays, after=self._last if waits else None)

    def reduced(self, flat: jax.Array) -> jax.Array:
        """Returns what it is given, which the next may wait for."""
        self._last = flat
        return flat


def _mean(
    local: list[jax.Array], axes: tuple[str, ...], size: int, strategy: Strategy, turns: _Turns
) -> list[jax.Array]:
    means: list[Any] = [None] * len(local)
    alone = set(range(len(local)))
    for positions in _packs(local) if strategy == "flat" else []:
        arrays = [local[i] for i in positions]
        (flat,) = _mean_of([turns.pack(arrays)], axes, size)
        for i, mean in zip(positions, unpack(turns.reduced(flat), arrays), strict=True):
            means[i] = mean
        alone.difference_update(positions)
    unpacked = sorted(alone)
    for i, mean in zip(unpacked, _mean_of([local[i] for i in unpacked], axes, size), strict=True):
        means[i] = mean
    return means


def _packs(local: Sequence[jax.Array]) -> list[list[int]]:
    """Returns the positions of the arrays that are packed, two or more together."""
    packs: list[list[int]] = []
    for group in alike(local):
        room = -1
        for i in group:
            if local[i].nbytes >= LARGE_LEAF_BYTES:
                continue
            if local[i].nbytes > room:
                packs.append([])
                room = PACKED_BYTES
            packs[-1].append(i)
            room -= local[i].nbytes
    return [positions for positions in packs if len(positions) > 1]


def _mean_of(arrays: Sequence[jax.Array], axes: tuple[str, ...], size: int) -> list[jax.Array]:
    """Returns the means of arrays of one dtype: divided before they are summed, as in torch, or with the same bits.

    Division by a power of two commutes with rounding, and XLA fuses one that comes after the sum with the update, which
    saves a kernel an array; but it must come before the sum where the sum may overflow.
    """
    if not arrays:
        return []
    if size & (size - 1) or arrays[0].dtype == jnp.float16:
        return list(lax.psum([array / size for array in arrays], axes))
    return [total / size for total in lax.psum(list(arrays), axes)]
