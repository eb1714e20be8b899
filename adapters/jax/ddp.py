"""The public wrapper: gradients averaged over a mapped axis, and whole training steps made of that."""

from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from unified_ddp.jax.averaging import GradientAveraging
from unified_ddp.jax.pytrees.precision import floating_dtype
from unified_ddp.jax.step.options import BufferSync, OnNonfinite, Reduction, StepOptions
from unified_ddp.jax.step.train_step import TrainStep


class DistributedDataParallel(GradientAveraging):
    """Averages gradients over the replicas of a mapped axis, bucket by bucket, and makes training steps of that.

    Arguments, errors and all methods but `train_step` are those of `GradientAveraging`.
    """

    def train_step(
        self,
        loss_fn: Callable[..., Any],
        optimizer: Any,
        *,
        mesh: Mesh | None = None,
        has_aux: bool = False,
        accumulate: int = 1,
        reduction: Reduction = "weighted_mean",
        divide_by_initial_world_size: bool = True,
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
                With a weight, the loss and each metric have one value for each row.
            optimizer: an `optax.GradientTransformation`; only trained parameters are shown to it. Line searches are
                given `value`, `grad` and `value_fn`, of the mean over replicas.
            mesh: the devices; None takes all, along `axis_name`. Axes that hold no data are left to the compiler.
            has_aux: whether `loss_fn` returns metrics too. They are averaged as the loss is.
            accumulate: number of microbatches that a replica splits its rows into; one reduction follows them.
            reduction: how losses are averaged over replicas if rows have weights; without, both are the mean.
                "weighted_mean": each replica counts by the sum of its weights, so that every example counts by its
                own. "mean": each replica's weighted mean counts the same, that of one without any weight as 0.
            divide_by_initial_world_size: as for torch's `Join`; for "mean", whether replicas without any weight count
                in what is divided by. No effect on "weighted_mean".
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
        options = StepOptions(
            has_aux=has_aux,
            accumulate=accumulate,
            reduction=reduction,
            divide_by_initial_world_size=divide_by_initial_world_size,
            compute_dtype=floating_dtype("compute_dtype", compute_dtype),
            buffer_sync=buffer_sync,
            on_nonfinite=on_nonfinite,
            donate=donate,
            max_in_flight=max_in_flight,
            timeout=timeout,
        )
        return TrainStep(self, loss_fn, optimizer, mesh, options)
