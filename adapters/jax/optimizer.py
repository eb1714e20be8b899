"""The reduction as an optax transformation, for steps that are written by hand."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from unified_ddp.errors import MisuseError
from unified_ddp.hooks.describe import describe
from unified_ddp.jax.averaging import GradientAveraging
from unified_ddp.jax.reduction.axes import axis_names, mark_varying, require_axes

if TYPE_CHECKING:
    import optax


def all_reduce_gradients(axis_name: str | Sequence[str] = "data", **options: Any) -> "optax.GradientTransformation":
    """Returns a transformation whose update is the mean of local gradients over all replicas of a mapped axis.

    Put it first: `optax.chain(all_reduce_gradients("data"), optax.adam(1e-3))`. Its `update` is called inside
    `jax.shard_map`, `jax.pmap` or `jax.vmap(axis_name=...)`. Under `shard_map(check_vma=True)` gradients are local only
    if the params are marked: `jax.grad(loss_fn)(varying(params, "data"), batch)`.

    Args:
        axis_name: the mapped axis, or several.
        options: bucket_cap_mb, bucket_cap_mb_list, comm_hook (without state), trainable, reduce_dtype, strategy, as
            `DistributedDataParallel` takes them. Frozen parameters' gradients are left as they are.

    Raises:
        ImportError: optax is not installed.
        AxisError: (at trace time) the axis is not mapped.
        MisuseError: (at trace time) types say that gradients are summed over the axis already; or (in `init`) the
            comm hook has state, which differs by replica, as the state of an optimizer does not.
    """
    try:
        import optax
    except ModuleNotFoundError as error:
        raise ImportError("all_reduce_gradients needs optax; install it with: pip install optax") from error
    axes = axis_names(axis_name)

    def averaging(tree: Any) -> GradientAveraging:
        averaging = GradientAveraging(tree, axis_name=axes, **options)
        if jax.tree.leaves(averaging.init_hook_state(1)):
            raise MisuseError(
                f"the comm hook {describe(options['comm_hook'])} has state of each replica's own, which the state of "
                "an optimizer, the same on all replicas, cannot hold. Use DistributedDataParallel's train_step, which "
                "carries it, or its value_and_grad(..., hook_state=...); or take a hook without state"
            )
        return averaging

    def init(params: Any) -> Any:
        averaging(params)
        return optax.EmptyState()

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return averaging(updates).all_reduce(updates), state

    return optax.GradientTransformation(init, update)


def varying(tree: Any, axis_name: str | Sequence[str] = "data") -> Any:
    """Returns the tree typed as varying over the axis, see `DistributedDataParallel.varying`."""
    axes = axis_names(axis_name)
    require_axes(axes, "varying")
    return mark_varying(tree, axes)
