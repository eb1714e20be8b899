"""Hooks of `unified_ddp.hooks` in JAX: their operations, collectives and state."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from unified_ddp.errors import MisuseError
from unified_ddp.hooks.collectives import Gather, Steps, Sum, drive
from unified_ddp.hooks.ops import Ops
from unified_ddp.hooks.protocol import BucketLayout, HookBucket, SharedHook, State
from unified_ddp.jax.reduction.axes import checked_axes, mark_varying, replica_count
from unified_ddp.jax.reduction.packing import unpack
from unified_ddp.plan import BucketPlan


def layouts_of(plan: BucketPlan, reduce_dtype: Any = None) -> tuple[BucketLayout, ...]:
    """Returns the buckets of a plan as hooks see them, with floating-point gradients cast to `reduce_dtype`."""
    layouts = []
    for index, bucket in enumerate(plan.buckets):
        narrowed = reduce_dtype is not None and jnp.issubdtype(bucket.dtype, jnp.floating)
        dtype = str(jnp.dtype(reduce_dtype)) if narrowed else bucket.dtype
        specs = [plan.params[i] for i in bucket.params]
        names, shapes = tuple(spec.name for spec in specs), tuple(tuple(spec.shape) for spec in specs)
        layouts.append(BucketLayout(index, dtype, names, shapes))
    return tuple(layouts)


class HookReducer:
    """Reduces the buckets of a plan, cast to `reduce_dtype`, by one of `unified_ddp.hooks`.

    Raises:
        MisuseError: the hook cannot reduce some bucket.
    """

    def __init__(self, hook: SharedHook, plan: BucketPlan, reduce_dtype: Any = None) -> None:
        self._hook = hook
        self._layouts = layouts_of(plan, reduce_dtype)
        self.initial_states = [hook.init(layout) for layout in self._layouts]

    def reduce(self, index: int, storage: jax.Array, state: State, axes: tuple[str, ...]) -> tuple[jax.Array, State]:
        """Returns the reduced bucket, and the new state typed as varying over the axes."""
        bucket = HookBucket(self._layouts[index], storage, replica_count(axes), JaxOps(axes))
        reduced, state = _run(self._hook(state, bucket), axes)
        return reduced, mark_varying(state, axes)


def local_states(initial: Sequence[State], given: Any) -> list[State]:
    """Returns this replica's states, without the axis of replicas that shard_map leaves with size 1.

    `initial` is what the hook starts with, one a bucket; `given` what the user passed as hook_state, or None.

    Raises:
        MisuseError: there is none, though the hook has state, or it is another hook's or plan's.
    """
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(initial)]
    if given is None:
        if shapes:
            raise MisuseError(
                "the comm hook has state, which the step has to take and return: make it with "
                "ddp.init_hook_state(replicas), pass hook_state=... to value_and_grad or all_reduce, and keep what "
                "comes back for the next step"
            )
        given = list(initial)
    leaves = jax.tree.leaves(given)
    have = [jnp.shape(leaf) for leaf in leaves]
    treedef: Any = jax.tree.structure(list(initial))
    if jax.tree.structure(given) != treedef or any(h not in (w, (1, *w)) for h, w in zip(have, shapes, strict=True)):
        raise MisuseError(
            f"hook_state does not fit the comm hook and plan: it has arrays of shapes {have}, and {shapes} are needed "
            "on each replica. Make it with ddp.init_hook_state, and give shard_map the spec P(axis) for it"
        )
    return jax.tree.unflatten(treedef, [jnp.reshape(leaf, shape) for leaf, shape in zip(leaves, shapes, strict=True)])


def stacked_like(states: Sequence[State], given: Any) -> Any:
    """Returns the states with the shapes of those that the user passed; None if there were none."""
    if given is None:
        return None
    return jax.tree.map(lambda state, like: jnp.reshape(state, jnp.shape(like)), list(states), given)


def _run(steps: Steps, axes: tuple[str, ...]) -> Any:
    def perform(request: Sum | Gather) -> jax.Array:
        array = mark_varying(request.array, axes)
        if isinstance(request, Sum):
            return lax.psum(array, axes)
        # Where types are checked, the result is to be replicated by type, as a sum is.
        return lax.all_gather(array, axes, to="invarying") if checked_axes(axes) else lax.all_gather(array, axes)

    return drive(steps, perform)


class JaxOps(Ops):
    """Operations on traced arrays of one replica."""

    def __init__(self, axes: tuple[str, ...]) -> None:
        super().__init__(jnp)
        self._axes = axes

    def split(self, flat: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
        """Returns the pieces of a flat array, with little to compile."""
        return unpack(flat, [jax.ShapeDtypeStruct((size,), flat.dtype) for size in sizes])

    def matmul(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Multiplies in the arrays' own precision, also on GPUs, as torch does."""
        return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)

    def top_k(self, array: jax.Array, k: int) -> jax.Array:
        """Returns the indices of the largest."""
        return lax.top_k(array, k)[1]

    def scatter_add(self, total: jax.Array, indices: jax.Array, values: jax.Array) -> jax.Array:
        """Adds values at indices, rank by rank: one scatter of all may add in any order on a GPU."""

        def add(rank: Any, total: jax.Array) -> jax.Array:
            return total.at[indices[rank]].add(values[rank], unique_indices=True)

        total = total + 0 * values[0, 0]  # typed as varying as the values
        return add(0, total) if len(values) == 1 else lax.fori_loop(0, len(values), add, total)

    def branch(self, condition: jax.Array, yes: Callable[[], Steps], no: Callable[[], Steps]) -> Steps:
        """Runs one of two at run time."""

        def run(steps: Callable[[], Steps]) -> Callable[[], Any]:
            def traced() -> Any:
                reduced, state = _run(steps(), self._axes)
                return reduced, mark_varying(state, self._axes)

            return traced

        # The step counter is the same on all replicas, but its type says that it varies, and then so would the results.
        if checked_axes(self._axes):
            condition = lax.pmax(condition.astype(jnp.int32), self._axes) > 0
        yield from ()  # a generator, as for other frameworks
        return lax.cond(condition, run(yes), run(no))
