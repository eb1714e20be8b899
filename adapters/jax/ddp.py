"""The wrapper: a plan and a mapped axis, and what a training step does with them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from unified_ddp.errors import PlanError
from unified_ddp.hooks.describe import describe
from unified_ddp.hooks.protocol import SharedHook
from unified_ddp.jax.axes import axis_names, axis_size, mark_varying, require_axes
from unified_ddp.jax.buffers import broadcast
from unified_ddp.jax.hooks import CommHook
from unified_ddp.jax.reduce import Strategy, check_strategy, default_strategy, reduce_buckets, require_local
from unified_ddp.jax.schema import Schema, floating_dtype, frozen_names, plan_of, positions_in, schema_of, without
from unified_ddp.jax.shared_hooks import initial_states, layouts_of, local_states, stacked_like
from unified_ddp.jax.step.replica_step import BufferSync, DivideBy, OnNonfinite, ReplicaStep
from unified_ddp.jax.step.train_step import TrainStep
from unified_ddp.plan import BucketPlan, bucket_caps

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel:
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
        self._frozen = frozen_names(params, trainable)
        self._reduce_dtype = floating_dtype("reduce_dtype", reduce_dtype)
        schema = self._schema(params)
        if not schema.specs:
            raise PlanError(
                "params has no leaf that can have a gradient"
                + (" and is not frozen" if self._frozen else "")
                + "; give a pytree with floating-point arrays"
            )
        if plan is None:
            plan = plan_of(schema, tuple(bucket_caps(bucket_cap_mb, bucket_cap_mb_list)))
        elif bucket_cap_mb is not None or bucket_cap_mb_list is not None:
            raise ValueError("plan already says what is in each bucket; leave bucket_cap_mb and bucket_cap_mb_list out")
        positions_in(plan, schema)
        self._plan = plan
        self._names = tuple(spec.name for spec in schema.specs)
        self._hook = comm_hook
        self._layouts = layouts_of(plan, self._reduce_dtype)
        self._initial_states = initial_states(comm_hook, self._layouts)
        self._strategy = strategy

    @property
    def plan(self) -> BucketPlan:
        """The buckets, in the order in which they are reduced."""
        return self._plan

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
            leaves, treedef = jax.tree.flatten(params)
            order = positions_in(self._plan, self._schema(params))

            def local_loss(trained: list[Any]) -> tuple[Any, tuple[Any, Any]]:
                filled = jax.tree.unflatten(treedef, _put(leaves, order, trained))
                loss, aux = _call(loss_fn, _replace(args, argnums, filled), kwargs, has_aux)
                # A loss that is reduced already varies no more, and one seed for all replicas would make its
                # gradient n times too small; as a varying value it is one term of the mean like any other.
                return mark_varying(loss, self._axes), (loss, aux)

            # Replicated params would get gradients that are summed over the axis already.
            trained = mark_varying([leaves[i] for i in order], self._axes)
            grad_fn = jax.value_and_grad(local_loss, has_aux=True, holomorphic=holomorphic)
            (_, (loss, aux)), grads = grad_fn(trained)
            state = hook_state
            if sync:
                grads, state = self._reduce(grads, hook_state)
            tree = jax.tree.unflatten(treedef, _put([None] * len(leaves), order, grads))
            value = (loss, aux) if has_aux else loss
            return (value, tree) if hook_state is None else (value, tree, state)

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

    def train_step(
        self,
        loss_fn: Callable[..., Any],
        optimizer: Any,
        *,
        mesh: Mesh | None = None,
        has_aux: bool = False,
        accumulate: int = 1,
        divide_by: DivideBy = "weights",
        compute_dtype: Any = None,
        buffer_sync: BufferSync = "broadcast",
        on_nonfinite: OnNonfinite = "ignore",
        donate: bool = False,
        max_in_flight: int | None = None,
        timeout: float | None = 600.0,
    ) -> TrainStep:
        """Returns a jitted training step over all devices; it maps the axis itself.

        `state = step.init(params)`, then `state, loss = step(state, batch)`, see `TrainStep`. Gradients that are to be
        clipped after the reduction are clipped by the optimizer: `optax.chain(optax.clip_by_global_norm(1.0), ...)`.

        Args:
            loss_fn: `loss_fn(params, batch)`, with the keyword argument `buffers` if `init` got some, `rng` if the
                step got a key, and the step's static ones. It sees one replica's rows (of one microbatch) and returns
                their mean loss; then the new buffers, if there are some; then, with `has_aux`, a pytree of metrics.
                With weights, the loss and each metric have one value for each weight.
            optimizer: an `optax.GradientTransformation`; only trained parameters are shown to it.
            mesh: the devices; None takes all, along `axis_name`. Axes that hold no data are left to the compiler.
            has_aux: whether `loss_fn` returns metrics too. They are averaged as the loss is.
            accumulate: number of microbatches that a replica splits its rows into; one reduction follows them.
            divide_by: how losses are averaged if there are weights. "weights": by the sum of all weights, so that
                every example counts the same. "active_replicas": each replica by its own weights, then by the number of
                replicas that have some, as torch's `Join` with `divide_by_initial_world_size=False`. "replicas": then
                by the number of all replicas, as with True.
            compute_dtype: floating-point leaves of params and batch are cast to it for `loss_fn`; params, their
                gradients and the optimizer keep their own types.
            buffer_sync: "broadcast" keeps replica 0's buffers, as torch does; "mean" averages floating-point ones.
            on_nonfinite: what follows if a gradient is not finite on some replica or in the mean. "ignore": the
                optimizer gets it. "skip": the state stays as it is, on all replicas, and `state.skipped` counts.
                "raise": it stays so too, and NonFiniteError names parameters and replicas, at the end of each step.
            donate: lets the step reuse the memory of the state that is passed in, which is then gone.
            max_in_flight: how many steps may be under way when the step returns; None means 0 on CPUs and 2 elsewhere.
            timeout: seconds to wait for a step that other processes take part in; None waits for ever.

        Raises:
            AxisError, TypeError, ValueError: an argument is wrong.
        """
        for name, value, known in (
            ("divide_by", divide_by, DivideBy),
            ("buffer_sync", buffer_sync, BufferSync),
            ("on_nonfinite", on_nonfinite, OnNonfinite),
        ):
            if value not in get_args(known):
                raise ValueError(f"{name} takes {', '.join(map(repr, get_args(known)))}, not {value!r}")
        if not isinstance(accumulate, int) or accumulate < 1:
            raise ValueError(f"accumulate takes a number of microbatches, 1 or more, not {accumulate!r}")
        if donate and on_nonfinite == "raise":
            raise ValueError('donate=True gives the old state away, and on_nonfinite="raise" leaves no new one')
        replica_step = ReplicaStep(
            self,
            loss_fn,
            has_aux,
            accumulate,
            divide_by,
            floating_dtype("compute_dtype", compute_dtype),
            buffer_sync,
            on_nonfinite,
            jax.process_count() > 1,
        )
        limit = 0 if on_nonfinite == "raise" else max_in_flight
        return TrainStep(self, optimizer, replica_step, mesh, donate, limit, timeout)

    def trained(self, params: Any) -> Any:
        """Returns the tree with None in place of every leaf that is frozen or cannot have a gradient."""
        leaves, treedef = jax.tree.flatten(params)
        order = positions_in(self._plan, self._schema(params))
        kept = _put([None] * len(leaves), order, [leaves[i] for i in order])
        return jax.tree.unflatten(treedef, kept)

    def with_trained(self, params: Any, trained: Any) -> Any:
        """Returns `params` with the leaves of `trained`, which `trained(params)` has, in their places."""
        leaves, treedef = jax.tree.flatten(params)
        order = positions_in(self._plan, self._schema(params))
        in_tree = sorted(order)
        return jax.tree.unflatten(treedef, _put(leaves, in_tree, jax.tree.leaves(trained)))

    def trained_names(self) -> tuple[str, ...]:
        """Names of the trained parameters, in tree order."""
        return self._names

    def options(self) -> dict[str, Any]:
        """What must be equal in all processes, beside params."""
        return {
            "axis_name": self._axes,
            "plan": f"{self._plan.fingerprint:016x}",
            "strategy": self.strategy,
            "reduce_dtype": self._reduce_dtype,
            "comm_hook": describe(self._hook),
        }

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
        leaves, treedef = jax.tree.flatten(grads)
        order = positions_in(self._plan, self._schema(grads))
        local = [jnp.asarray(leaves[i]) for i in order]
        require_local(self._plan, local, self._axes)
        means, state = self._reduce(local, hook_state)
        tree = jax.tree.unflatten(treedef, _put(leaves, order, means))
        return tree if hook_state is None else (tree, state)

    def mean(self, tree: Any) -> Any:
        """Returns the mean over all replicas of every number in a pytree, such as the loss; for metrics."""
        require_axes(self._axes, "mean")
        size = axis_size(self._axes)

        def share(leaf: Any) -> jax.Array:
            array = jnp.asarray(leaf)
            if not jnp.issubdtype(array.dtype, jnp.inexact):
                array = array.astype(jnp.result_type(float))
            return array / size

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
        size = axis_size(self._axes)
        if not isinstance(source, int | np.integer) or not 0 <= source < size:
            raise ValueError(f"source takes the number of a replica, 0 to {size - 1}, not {source!r}")
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
        leaves, treedef = jax.tree.flatten(params)
        order = positions_in(self._plan, self._schema(params))
        zeros = mark_varying([jnp.zeros_like(leaves[i]) for i in order], self._axes)
        return jax.tree.unflatten(treedef, _put([None] * len(leaves), order, zeros))

    def _schema(self, tree: Any) -> Schema:
        schema = schema_of(tree)
        return without(schema, self._frozen) if self._frozen else schema

    def _reduce(self, local: Sequence[jax.Array], hook_state: Any) -> tuple[list[jax.Array], Any]:
        states = local_states(self._initial_states, hook_state)
        sent = [_cast(grad, self._reduce_dtype) for grad in local]
        reduced, after = reduce_buckets(self._plan, sent, self._axes, self.strategy, self._hook, self._layouts, states)
        means = [mean.astype(grad.dtype) for mean, grad in zip(reduced, local, strict=True)]
        return means, (None if hook_state is None else stacked_like(after, hook_state))


def _cast(grad: jax.Array, dtype: Any) -> jax.Array:
    return grad.astype(dtype) if dtype is not None and jnp.issubdtype(grad.dtype, jnp.floating) else grad


def _call(loss_fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], has_aux: bool) -> tuple[Any, Any]:
    result = loss_fn(*args, **kwargs)
    if not has_aux:
        return result, None
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"with has_aux=True the loss function returns a pair (loss, aux), not {type(result).__name__}")
    return result


def _put(leaves: Sequence[Any], positions: Sequence[int], values: Sequence[Any]) -> list[Any]:
    filled = list(leaves)
    for position, value in zip(positions, values, strict=True):
        filled[position] = value
    return filled


def _replace(args: Sequence[Any], argnums: int | Sequence[int], params: Any) -> list[Any]:
    replaced = list(args)
    for i, value in ((argnums, params),) if isinstance(argnums, int) else zip(argnums, params, strict=True):
        replaced[i] = value
    return replaced
