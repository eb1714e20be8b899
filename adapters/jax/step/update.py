"""The step as it is compiled: the replicas' part mapped over the mesh, and the optimizer behind it."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from unified_ddp.errors import MisuseError
from unified_ddp.jax.averaging import GradientAveraging
from unified_ddp.jax.pytrees.planned import PlannedLeaves
from unified_ddp.jax.step.replica_step import ReplicaStep
from unified_ddp.jax.step.state import StepInputs, StepResults, TrainState


@dataclasses.dataclass(frozen=True, eq=False)  # a loss function need not be hashable
class Update:
    """Takes a step on arrays that lie on the mesh; pure, to be jitted."""

    averaging: GradientAveraging
    optimizer: Any
    replica_step: ReplicaStep
    mesh: Mesh

    def step(self, state: TrainState, inputs: StepInputs) -> tuple[TrainState, Any, dict[str, jax.Array]]:
        """Returns the next state, the value that the user gets, and the checks of `StepResults`.

        Raises:
            MisuseError: (at trace time) the optimizer's state is not of its making, or it asks for arguments that a
                step does not have.
        """
        import optax

        params = self.averaging.planned.find(state.params)
        _require_own(state.opt_state, jax.eval_shape(self.optimizer.init, params.trained))
        results = self._mapped(state, inputs)
        updates, opt_state = self._updates(state, inputs, params, results)
        updated = self.averaging.planned.find(optax.apply_updates(params.trained, updates))
        new = (params.replaced(updated.values), opt_state, results.buffers, results.hook_state)
        skipped, checks = state.skipped, results.checks
        if checks:
            refused = checks.get("uneven", False) | checks.get("apart", False)
            taken = checks.get("finite", True) & jnp.logical_not(refused)
            old = (state.params, state.opt_state, state.buffers, state.hook_state)
            new = jax.tree.map(lambda after, before: jnp.where(taken, after, before), new, old)
            skipped += 1 - taken.astype(skipped.dtype)
        checks = checks if results.bad is None else checks | {"bad": results.bad}
        value = (results.loss, results.aux) if self.replica_step.options.has_aux else results.loss
        return TrainState(state.step + 1, *new, skipped), value, checks

    def _mapped(self, state: TrainState, inputs: StepInputs) -> StepResults:
        axes = self.averaging.axis_name
        mapped = jax.shard_map(
            self.replica_step,
            mesh=self.mesh,
            in_specs=(TrainState(P(), P(), P(), P(), P(axes), P()), inputs.specs(axes)),
            out_specs=self.replica_step.specs(),
            check_vma=False,  # loss functions that start a scan's carry from constants are refused otherwise
            **manual_axes(self.mesh, axes),
        )
        return mapped(dataclasses.replace(state, opt_state=None), inputs)

    def _updates(
        self, state: TrainState, inputs: StepInputs, params: PlannedLeaves, results: StepResults
    ) -> tuple[Any, Any]:
        """What the optimizer makes of the mean gradients. A line search may ask for the loss elsewhere, and its
        gradients, which are then those of a step from there: of the same rows, keys, buffers and reduction.
        """

        def step_from(trained: Any) -> tuple[Any, Any]:
            whole = params.replaced(self.averaging.planned.find(trained).values)
            there = self._mapped(dataclasses.replace(state, params=whole), inputs)
            return there.loss, there.grads

        value_fn = jax.custom_vjp(lambda trained: step_from(trained)[0])
        value_fn.defvjp(step_from, lambda grads, seed: (jax.tree.map(lambda g: (g * seed).astype(g.dtype), grads),))
        given = {"value": results.loss, "grad": results.grads, "value_fn": value_fn}
        try:
            return self.optimizer.update(results.grads, state.opt_state, params.trained, **given)
        except (TypeError, ValueError) as error:
            if not re.search(r"missing \d+ required keyword-only|must be provided", str(error)):
                raise
            raise MisuseError(
                f"the optimizer asks for more than train_step has to give it, which is {', '.join(given)}: {error}. "
                "Take a transformation that needs no more, or write the step by hand with ddp.value_and_grad"
            ) from error


def _require_own(have: Any, want: Any) -> None:
    """Raises MisuseError, naming the first difference, unless the optimizer's state is as its `init` makes it."""
    remedy = (
        "Make the state with init of this very step, or make the step with the optimizer and the trainable= that the "
        "state was made with; nothing was changed"
    )
    held, needed = (
        {
            jax.tree_util.keystr(path): f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}"
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }
        for tree in (have, want)
    )
    for path in needed | held:
        if held.get(path) != needed.get(path):
            raise MisuseError(
                f"the state that the step was given is not of its optimizer and trained parameters: opt_state{path} is "
                f"{held.get(path, 'absent')}, where the optimizer has {needed.get(path, 'nothing')}. {remedy}"
            )
    built, needs = str(jax.tree.structure(have)), str(jax.tree.structure(want))
    if built != needs:
        raise MisuseError(
            f"the state that the step was given is not of its optimizer: opt_state is built as {built}, and the "
            f"optimizer's as {needs}. {remedy}"
        )


def manual_axes(mesh: Mesh, axes: tuple[str, ...]) -> dict[str, Any]:
    """Returns the argument of `jax.shard_map` by which axes of the mesh that hold no data are left to the compiler."""
    return {} if set(mesh.axis_names) == set(axes) else {"axis_names": set(axes)}
