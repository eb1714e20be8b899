"""Reducing gradients bucket by bucket: how a bucket becomes one or several all-reduces.

Measured on CPU: across processes every operand of an all-reduce costs a round trip, so small gradients are packed; in
one process packing buys nothing and costs compile time.
"""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from unified_ddp.errors import ReductionError
from unified_ddp.hooks.protocol import BucketLayout, SharedHook, State
from unified_ddp.jax.axes import axis_size, checked_axes, varying_axes
from unified_ddp.jax.hooks import CommHook, JaxBucket, run_hook
from unified_ddp.jax.packing import pack, unpack
from unified_ddp.jax.shared_hooks import run_shared_hook
from unified_ddp.plan import MIB, BucketPlan

__all__ = ["LARGE_LEAF_BYTES", "Strategy", "default_strategy", "reduce_buckets", "require_local"]

Strategy = Literal["flat", "tuple"]

LARGE_LEAF_BYTES = 4 * MIB
"""A gradient of at least this size is reduced where it lies: a copy would cost more than one more operand, some 2 ms
between processes on CPUs. Of 1, 4 and any MiB, 4 gave the fastest steps of a transformer and a ResNet."""


def check_strategy(strategy: str | None) -> None:
    """Raises ValueError unless `strategy` is a known one or None."""
    if strategy is not None and strategy not in get_args(Strategy):
        raise ValueError(f"strategy takes {', '.join(map(repr, get_args(Strategy)))} or None, not {strategy!r}")


def default_strategy() -> Strategy:
    """Returns "flat" when the replicas are in several processes, "tuple" within one."""
    return "flat" if jax.process_count() > 1 else "tuple"


def require_local(plan: BucketPlan, grads: Sequence[jax.Array], axes: Sequence[str]) -> None:
    """Raises ReductionError if the types of gradients say that they are the same on every replica.

    Under `shard_map(check_vma=True)` such gradients are sums over the replicas already (or means, or zeros): a second
    reduction of a sum would be wrong by a factor of the number of replicas.
    """
    checked = checked_axes(axes)
    reduced = [spec.name for spec, grad in zip(plan.params, grads, strict=True) if checked - varying_axes(grad)]
    if reduced:
        more = f" and {len(reduced) - 1} more" if len(reduced) > 1 else ""
        raise ReductionError(
            f"the gradient of '{reduced[0]}'{more} does not vary over the mapped axis {', '.join(map(repr, axes))}: "
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
    """
    size = axis_size(axes)
    reduced: list[Any] = [None] * len(grads)
    after = list(states)
    for index, bucket in enumerate(plan.buckets):
        local = [grads[i] for i in bucket.params]
        if hook is None:
            means = _mean(local, axes, size, strategy)
        elif isinstance(hook, SharedHook):
            flat, after[index] = run_shared_hook(hook, states[index], layouts[index], pack(local), axes)
            means = unpack(flat, local)
        else:
            specs = tuple(plan.params[i] for i in bucket.params)
            names = tuple(spec.name for spec in specs)
            last = index == len(plan.buckets) - 1
            view = JaxBucket(pack(local), index, last, axes, size, names, bucket, specs)
            means = unpack(run_hook(hook, view), local)
        for i, mean in zip(bucket.params, means, strict=True):
            reduced[i] = mean
    return reduced, after


def _mean(local: list[jax.Array], axes: tuple[str, ...], size: int, strategy: Strategy) -> list[jax.Array]:
    small = [i for i, grad in enumerate(local) if grad.nbytes < LARGE_LEAF_BYTES] if strategy == "flat" else []
    large = [i for i in range(len(local)) if i not in set(small)]
    if len(small) < 2:
        return _mean_of(local, axes, size)
    flat, *rest = _mean_of([pack([local[i] for i in small]), *(local[i] for i in large)], axes, size)
    means = dict(zip(small, unpack(flat, [local[i] for i in small]), strict=True))
    means.update(zip(large, rest, strict=True))
    return [means[i] for i in range(len(local))]


def _mean_of(arrays: Sequence[jax.Array], axes: tuple[str, ...], size: int) -> list[jax.Array]:
    """Returns the means of arrays of one dtype: divided before they are summed, as in torch, or with the same bits.

    Division by a power of two commutes with rounding, and XLA fuses one that comes after the sum with the update, which
    saves a kernel an array; but it must come before the sum where the sum may overflow.
    """
    if size & (size - 1) or arrays[0].dtype == jnp.float16:
        return list(lax.psum([array / size for array in arrays], axes))
    return [total / size for total in lax.psum(list(arrays), axes)]
