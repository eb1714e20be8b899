"""One replica's part of a training step, as it is traced: microbatches, their reduction, buffers, checks."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from unified_ddp.jax.averaging import GradientAveraging
from unified_ddp.jax.reduction.broadcast import broadcast
from unified_ddp.jax.step.keys import fold_in_keys, kept_keys
from unified_ddp.jax.step.objective import Objective
from unified_ddp.jax.step.options import StepOptions
from unified_ddp.jax.step.replica_table import ReplicaTable
from unified_ddp.jax.step.state import StepInputs, StepResults, TrainState


@dataclasses.dataclass(frozen=True, eq=False)
class ReplicaStep:
    """Gives what one replica contributes to a step, and what all make of it.

    With `compare`, they also find out if processes differ in what they were given.
    """

    averaging: GradientAveraging
    objective: Objective
    options: StepOptions
    compare: bool

    def __call__(self, state: TrainState, inputs: StepInputs) -> StepResults:
        """Takes the step up to the optimizer; called inside the mapped axis."""
        axes = self.averaging.axis_name
        told = [jnp.int32(inputs.fingerprint()), state.step, inputs.digest] if self.compare else []
        table = ReplicaTable.gather(axes, told, inputs.weight)
        scale = table.scale(self.options)
        checks: dict[str, Any] = {}
        if self.compare:  # all processes are to learn of it before they meet in other collectives than this
            differ = table.differ
            scale = jnp.where(jnp.any(differ), 0, scale)
            checks = {"uneven": differ[0], "apart": differ[1] | differ[2], "step": state.step}
        own = dataclasses.replace(state, buffers=fold_in_keys(state.buffers, lax.axis_index(axes)))
        loss, aux, grads, buffers = self._accumulated(own, inputs.of_replica(state.step, axes), scale)
        buffers = kept_keys(own.buffers, buffers, state.buffers)
        reduced = self.averaging.all_reduce(grads, state.hook_state)
        means, hook_state = (reduced, None) if state.hook_state is None else reduced
        loss, aux = self.averaging.mean((loss, aux))
        finite, bad = self._finite(jax.tree.leaves(grads), jax.tree.leaves(means))
        return StepResults(loss, aux, means, self._synced(buffers, table), hook_state, checks | finite, bad)

    def specs(self) -> StepResults:
        """Returns over which axes each result differs."""
        by_replica = P(self.averaging.axis_name)
        return StepResults(P(), P(), P(), P(), by_replica, P(), by_replica)

    def _accumulated(self, state: TrainState, inputs: StepInputs, scale: Any) -> tuple[Any, Any, Any, Any]:
        """Returns loss, aux and local gradients summed over microbatches, and the buffers after them."""
        count = self.options.accumulate
        if count == 1:
            return self._microbatch(state.params, state.buffers, inputs, scale)

        def body(carry: tuple[Any, Any], microbatch: StepInputs) -> tuple[Any, Any]:
            total, buffers = carry
            loss, aux, grads, buffers = self._microbatch(state.params, buffers, microbatch, scale)
            return (jax.tree.map(jnp.add, total, grads), buffers), (loss, aux)

        start = (self.averaging.zero_gradients(state.params), state.buffers)
        (grads, buffers), values = lax.scan(body, start, inputs.of_microbatches(count))
        loss, aux = jax.tree.map(lambda value: value.sum(0), values)
        return loss, aux, grads, buffers

    def _microbatch(self, params: Any, buffers: Any, inputs: StepInputs, scale: Any) -> tuple[Any, Any, Any, Any]:
        local = self.averaging.value_and_grad(self.objective, has_aux=True, sync=False)
        (loss, (aux, after)), grads = local(params, buffers, inputs, scale)
        if inputs.weight is not None:  # padding alone leaves nothing: no buffers, and no zero times infinity
            some = jnp.any(inputs.weight != 0)
            after = jax.tree.map(lambda new, old: jnp.where(some, new, old), after, buffers)
            grads = jax.tree.map(lambda grad: jnp.where(some, grad, 0), grads)
        return loss, aux, grads, after

    def _synced(self, buffers: Any, table: ReplicaTable) -> Any:
        """Those of the first replica, or their mean; of those that have any weight, as the others saw no data."""
        active = table.active
        leaves, treedef = jax.tree.flatten(buffers)
        averaged = [self.options.buffer_sync == "mean" and jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves]
        kept = [x for x, is_averaged in zip(leaves, averaged, strict=True) if not is_averaged]
        firsts = iter(broadcast(kept, table.axes, jnp.argmax(active), self.averaging.strategy))
        count = jnp.sum(active)
        share = jnp.where(count > 0, active[lax.axis_index(table.axes)] * len(active) / jnp.maximum(count, 1), 1)
        shares = [x * share.astype(x.dtype) for x, is_averaged in zip(leaves, averaged, strict=True) if is_averaged]
        means = iter(self.averaging.mean(shares))
        return jax.tree.unflatten(treedef, [next(means if is_averaged else firsts) for is_averaged in averaged])

    def _finite(self, grads: list[jax.Array], means: list[jax.Array]) -> tuple[dict[str, jax.Array], Any]:
        if self.options.on_nonfinite == "ignore":
            return {}, None
        bad = jnp.stack([~jnp.all(jnp.isfinite(grad)) for grad in grads])
        bad_mean = jnp.stack([~jnp.all(jnp.isfinite(mean)) for mean in means])
        most = lax.pmax(jnp.any(bad).astype(jnp.int32), self.averaging.axis_name)
        finite = {"finite": (most == 0) & ~jnp.any(bad_mean)}
        return (finite | {"bad_mean": bad_mean}, bad[None]) if self.options.on_nonfinite == "raise" else (finite, None)
