"""The step as it is compiled: the replicas' part mapped over the mesh, and the optimizer behind it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from unified_ddp.jax.averaging import GradientAveraging
from unified_ddp.jax.step.replica_step import ReplicaStep
from unified_ddp.jax.step.state import StepInputs, TrainState


@dataclasses.dataclass(frozen=True, eq=False)  # a loss function need not be hashable
class Update:
    """Takes a step on arrays that lie on the mesh; pure, to be jitted."""

    averaging: GradientAveraging
    optimizer: Any
    replica_step: ReplicaStep
    mesh: Mesh

    def step(self, state: TrainState, inputs: StepInputs) -> tuple[TrainState, Any, dict[str, jax.Array]]:
        """Returns the next state, the value that the user gets, and the checks of `StepResults`."""
        import optax

        axes, planned = self.averaging.axis_name, self.averaging.planned
        by_replica = P(axes)
        mapped = jax.shard_map(
            self.replica_step,
            mesh=self.mesh,
            in_specs=(TrainState(P(), P(), P(), P(), by_replica, P()), inputs.specs(axes)),
            out_specs=self.replica_step.specs(),
            check_vma=False,  # loss functions that start a scan's carry from constants are refused otherwise
            **manual_axes(self.mesh, axes),
        )
        results = mapped(dataclasses.replace(state, opt_state=None), inputs)
        params = planned.find(state.params)
        updates, opt_state = self.optimizer.update(results.grads, state.opt_state, params.trained, value=results.loss)
        updated = planned.find(optax.apply_updates(params.trained, updates))
        new = (params.replaced(updated.values), opt_state, results.buffers, results.hook_state)
        skipped, checks = state.skipped, results.checks
        if checks:
            refused = checks.get("uneven", False) | checks.get("apart", False)
            taken = checks.get("finite", True) & jnp.logical_not(refused)
            old = (state.params, state.opt_state, state.buffers, state.hook_state)
            new = jax.tree.map(lambda after, before: jnp.where(taken, after, before), new, old)
            skipped += 1 - taken.astype(skipped.dtype)
        value = (results.loss, results.aux) if self.replica_step.options.has_aux else results.loss
        return TrainState(state.step + 1, *new, skipped), value, checks


def manual_axes(mesh: Mesh, axes: tuple[str, ...]) -> dict[str, Any]:
    """Returns the argument of `jax.shard_map` by which axes of the mesh that hold no data are left to the compiler."""
    return {} if set(mesh.axis_names) == set(axes) else {"axis_names": set(axes)}
