"""The wrapper without `train_step`: a plan and a mapped axis, and gradients averaged over it."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from unified_ddp.hooks.describe import describe
from unified_ddp.hooks.protocol import SharedHook
from unified_ddp.jax.comm_hooks.function import CommHook, FunctionHook
from unified_ddp.jax.comm_hooks.shared import HookReducer, local_states, stacked_like
from unified_ddp.jax.pytrees.planned import PlannedParams
from unified_ddp.jax.pytrees.precision import cast_floating, floating_dtype
from unified_ddp.jax.reduction.axes import axis_names, mark_varying, replica_count, require_axes
from unified_ddp.jax.reduction.broadcast import broadcast
from unified_ddp.jax.reduction.buckets import reduce_buckets, require_local
from unified_ddp.jax.reduction.mean import Strategy, check_strategy, default_strategy
from unified_ddp.plan import BucketPlan


class GradientAveraging:
    """Averages gradients over the replicas of a mapped axis, bucket by bucket.

    It holds no arrays: params are passed to its functions, which are to be called inside `jax.shard_map`, `jax.pmap`
    or `jax.vmap(axis_name=...)`. All of them raise AxisError at trace time where an axis of `axis_name` is not mapped.

    Args:
        params: any pytree of arrays or `jax.ShapeDtypeStruct`s, with the shapes that one replica sees. Leaves that
            cannot have gradients (integers, bools, PRNG keys, no arrays) are skipped; their gradient is None.
        axis_name: the mapped axis, or several, over which data is split.
        bucket_cap_mb: bucket size in MiB; None means 25 after a first bucket of 1.
        bucket_cap_mb_list: one size in MiB a bucket, the last repeats; goes before `bucket_cap_mb`.
        plan: a plan to take over by name instead, such as that of a torch module with the same names.
        comm_hook: reduces a bucket in place of the mean by all-reduce: one of `unified_ddp.hooks`, or a `CommHook`.
        trainable: which parameters are trained: a pytree of bools that is a prefix of `params`, or a function of a
            name such as "conv1.kernel"; None trains all. The others are frozen: no gradient, and nothing is reduced.
        reduce_dtype: floating-point type to reduce gradients in, such as `jnp.bfloat16`; None keeps their own.
        strategy: "flat" packs the small gradients of a bucket into one array, "tuple" gives them to one `psum` as they
            are. None chooses "flat" when there are several processes, "tuple" within one.

    Raises:
        PlanError: no leaf can have a gradient, two have one name, or `plan` differs in names, shapes or dtypes.
        MisuseError: the comm hook cannot reduce some bucket, such as one of complex numbers.
        TypeError, ValueError: another argument is wrong.
    """

    def __init__(
        self,
        params: Any,
        *,
        axis_name: str | Sequence[str] = "data",
        bucket_cap_mb: float | None = None,
        bucket_cap_mb_list: Sequence[float] | None = None,
        plan: BucketPlan | None = None,
        comm_hook: CommHook | SharedHook | None = None,
        trainable: Any | Callable[[str], bool] | None = None,
        reduce_dtype: Any = None,
        strategy: Strategy | None = None,
    ) -> None:
        check_strategy(strategy)
        self._axes = axis_names(axis_name)
        self._reduce_dtype = floating_dtype("reduce_dtype", reduce_dtype)
        self.planned = PlannedParams(params, trainable, plan, bucket_cap_mb, bucket_cap_mb_list)
        self._hook = comm_hook
        self._reducer: HookReducer | None = None
        if comm_hook is not None:
            if not isinstance(comm_hook, SharedHook):
                comm_hook = FunctionHook(comm_hook, self.plan, self._axes)
            self._reducer = HookReducer(comm_hook, self.plan, self._reduce_dtype)
        self._initial_states = self._reducer.initial_states if self._reducer else []
        self._strategy = strategy

    @property
    def plan(self) -> BucketPlan:
        """The buckets, in the order in which they are reduced."""
        return self.planned.plan

    @property
    def axis_name(self) -> tuple[str, ...]:
        """The mapped axes that are reduced over."""
        return self._axes

    @property
    def strategy(self) -> Strategy:
        """How a bucket is reduced: "flat" or "tuple"."""
        return self._strategy or default_strategy()

    def init_hook_state(self, replicas: int) -> Any:
        """Returns the comm hook's state before the first step; call it outside mapped functions.

        Args:
            replicas: number of replicas.

        Returns:
            A pytree of read-only numpy arrays with a leading axis of replicas, to be split over `axis_name` like a
            batch, in and out (`P(axis_name)`): each replica has its own. No arrays if the hook has no state.
        """
        return jax.tree.map(lambda leaf: np.broadcast_to(leaf, (replicas, *leaf.shape)), self._initial_states)

    def value_and_grad(
        self,
        loss_fn: Callable[..., Any],
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        sync: bool = True,
        holomorphic: bool = False,
        hook_state: Any = None,
    ) -> Callable[..., tuple[Any, ...]]:
        """Returns a function that gives this replica's loss and the mean gradients of all replicas.

        The gradients are those of the mean over replicas of what `loss_fn` returns. The loss that comes back is not
        reduced: it is this replica's value, as `loss_fn` returned it; average it with `mean`.

        Args:
            loss_fn: gives the loss of this replica's data, a scalar; with `has_aux`, a pair of it and anything else.
            argnums: which argument is the params pytree; if several, the wrapped params are the tuple of them.
            has_aux: as in `jax.value_and_grad`; the first result is then the pair (loss, aux).
            sync: False leaves the gradients local, to be summed over microbatches and reduced once by `all_reduce`.
            holomorphic: as in `jax.value_and_grad`; all params and the loss are complex then.
            hook_state: this replica's part of what `init_hook_state` or the step before returned.

        Returns:
            A function of the arguments of `loss_fn`. Its gradients have the structure of the params, with None where a
            leaf cannot have a gradient, and are replicated by type, or varying with `sync=False`. With `hook_state`, a
            third result is the state for the next step.

        Raises:
            AxisError: (at trace time) the axis is not mapped.
            PlanError: (at trace time) the params differ from the plan in names, shapes or dtypes.
            MisuseError: (at trace time) the comm hook has state, and `hook_state` is missing or does not fit.
        """

        @functools.wraps(loss_fn)
        def value_and_grad(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
            require_axes(self._axes, "value_and_grad")
            if (last := argnums if isinstance(argnums, int) else max(argnums)) >= len(args):
                raise TypeError(
                    f"params are argument {last} (argnums={argnums}), but {len(args)} positional arguments were given; "
                    "pass params by position, as for jax.grad"
                )
            params = args[argnums] if isinstance(argnums, int) else tuple(args[i] for i in argnums)
            leaves = self.planned.find(params)

            def local_loss(trained: list[Any]) -> tuple[Any, tuple[Any, Any]]:
                loss, aux = _call(loss_fn, _replace(args, argnums, leaves.replaced(trained)), kwargs, has_aux)
                # A loss that is reduced already varies no more, and one seed for all replicas would make its
                # gradient n times too small; as a varying value it is one term of the mean like any other.
                return mark_varying(loss, self._axes), (loss, aux)

            # Replicated params would get gradients that are summed over the axis already.
            trained = mark_varying(leaves.values, self._axes)
            grad_fn = jax.value_and_grad(local_loss, has_aux=True, holomorphic=holomorphic)
            (_, (loss, aux)), grads = grad_fn(trained)
            state = hook_state
            if sync:
                grads, state = self._reduce(grads, hook_state)
            results = (loss, aux) if has_aux else loss, leaves.alone(grads)
            return results if hook_state is None else (*results, state)

        return value_and_grad

    def grad(
        self,
        loss_fn: Callable[..., Any],
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        sync: bool = True,
        holomorphic: bool = False,
        hook_state: Any = None,
    ) -> Callable[..., Any]:
        """Returns a function that gives the mean gradients alone, or with `has_aux` the pair (gradients, aux).

        Arguments and errors are those of `value_and_grad`; results are ordered as those of `jax.grad`, and with
        `hook_state`, the state for the next step is one more.
        """
        both = self.value_and_grad(loss_fn, argnums, has_aux, sync, holomorphic, hook_state)

        @functools.wraps(loss_fn)
        def grad(*args: Any, **kwargs: Any) -> Any:
            value, grads, *state = both(*args, **kwargs)
            results = (grads, value[1], *state) if has_aux else (grads, *state)
            return results if len(results) > 1 else grads

        return grad

    def all_reduce(self, grads: Any, hook_state: Any = None) -> Any:
        """Returns the mean of local gradients over all replicas, replicated by type.

        Args:
            grads: a pytree with the names, shapes and dtypes of the params; leaves that have no gradient may be None.
            hook_state: as for `value_and_grad`; the result is then a pair of gradients and state.

        Raises:
            AxisError: the axis is not mapped.
            PlanError: names, shapes or dtypes differ from the plan.
            MisuseError: under `shard_map(check_vma=True)`, gradients are the same on all replicas by type: they
                have been summed or reduced before.
        """
        require_axes(self._axes, "all_reduce")
        leaves = self.planned.find(grads)
        local = [jnp.asarray(grad) for grad in leaves.values]
        require_local(self.plan, local, self._axes)
        means, state = self._reduce(local, hook_state)
        tree = leaves.replaced(means)
        return tree if hook_state is None else (tree, state)

    def mean(self, tree: Any) -> Any:
        """Returns the mean over all replicas of every number in a pytree, such as the loss; for metrics."""
        require_axes(self._axes, "mean")
        replicas = replica_count(self._axes)

        def share(leaf: Any) -> jax.Array:
            array = jnp.asarray(leaf)
            if not jnp.issubdtype(array.dtype, jnp.inexact):
                array = array.astype(jnp.result_type(float))
            return array / replicas

        return lax.psum(jax.tree.map(share, tree), self._axes)

    def sync_buffers(self, buffers: Any) -> Any:
        """Returns replica 0's buffers (such as batch statistics) on all replicas, see `broadcast_from`."""
        require_axes(self._axes, "sync_buffers")
        return broadcast(buffers, self._axes, 0, self.strategy)

    def broadcast_from(self, tree: Any, source: int = 0) -> Any:
        """Returns one replica's values on all replicas, bit for bit and replicated by type.

        Args:
            tree: any pytree; arrays of any dtype and PRNG keys.
            source: number of the replica, from 0; over several axes, counted with the last axis fastest.

        Raises:
            AxisError: the axis is not mapped.
            ValueError: there is no replica of this number.
        """
        require_axes(self._axes, "broadcast_from")
        replicas = replica_count(self._axes)
        if not isinstance(source, int | np.integer) or not 0 <= source < replicas:
            raise ValueError(f"source takes the number of a replica, 0 to {replicas - 1}, not {source!r}")
        return broadcast(tree, self._axes, source, self.strategy)

    def varying(self, tree: Any) -> Any:
        """Returns the tree typed as varying over the axis; needed under `shard_map(check_vma=True)`, no-op elsewhere.

        Gradients with respect to params so marked are local. Values do not change.
        """
        require_axes(self._axes, "varying")
        return mark_varying(tree, self._axes)

    def zero_gradients(self, params: Any) -> Any:
        """Returns zeros to sum local gradients into, with None where a leaf cannot have a gradient."""
        require_axes(self._axes, "zero_gradients")
        leaves = self.planned.find(params)
        return leaves.alone(mark_varying([jnp.zeros_like(leaf) for leaf in leaves.values], self._axes))

    def compared(self) -> dict[str, Any]:
        """Returns the options that must be equal in all processes."""
        return {
            "axis_name": self._axes,
            "plan": f"{self.plan.fingerprint:016x}",
            "strategy": self.strategy,
            "reduce_dtype": self._reduce_dtype,
            "comm_hook": describe(self._hook),
        }

    def _reduce(self, local: Sequence[jax.Array], hook_state: Any) -> tuple[list[jax.Array], Any]:
        states = local_states(self._initial_states, hook_state)
        sent = cast_floating(local, self._reduce_dtype)
        reduce = self._reducer.reduce if self._reducer else None
        reduced, after = reduce_buckets(self.plan, sent, self._axes, self.strategy, reduce, states)
        means = [mean.astype(grad.dtype) for mean, grad in zip(reduced, local, strict=True)]
        return means, stacked_like(after, hook_state)


def _call(loss_fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], has_aux: bool) -> tuple[Any, Any]:
    result = loss_fn(*args, **kwargs)
    if not has_aux:
        return result, None
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"with has_aux=True the loss function returns a pair (loss, aux), not {type(result).__name__}")
    return result


def _replace(args: Sequence[Any], argnums: int | Sequence[int], params: Any) -> list[Any]:
    replaced = list(args)
    for i, value in ((argnums, params),) if isinstance(argnums, int) else zip(argnums, params, strict=True):
        replaced[i] = value
    return replaced
