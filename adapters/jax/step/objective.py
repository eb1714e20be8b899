"""The user's loss function as a term of what a step minimises."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from unified_ddp.jax.pytrees.precision import cast_floating
from unified_ddp.jax.step.options import StepOptions
from unified_ddp.jax.step.state import StepInputs


@dataclasses.dataclass(frozen=True, eq=False)
class Objective:
    """Calls `loss_fn` as `train_step` describes it, and checks what it returns."""

    loss_fn: Callable[..., Any]
    options: StepOptions

    def __call__(self, params: Any, buffers: Any, inputs: StepInputs, scale: Any) -> tuple[Any, tuple[Any, Any]]:
        """Returns a microbatch's term in the sum whose mean over replicas is minimised, and (terms of aux, buffers).

        Raises:
            TypeError: (at trace time) `loss_fn` returned something else than it is to return.
        """
        buffers = jax.tree.map(lambda leaf: leaf, buffers)  # nnx variables made here may be changed here
        given = dict(inputs.static)
        given |= ({} if buffers is None else {"buffers": buffers}) | ({} if inputs.rng is None else {"rng": inputs.rng})
        dtype = self.options.compute_dtype
        result = self.loss_fn(cast_floating(params, dtype), cast_floating(inputs.batch, dtype), **given)
        loss, new_buffers, aux = self._parts(result, buffers)
        if inputs.weight is None and jnp.ndim(loss):
            raise TypeError(
                f"loss_fn returned a loss of shape {jnp.shape(loss)}; return the mean over the batch, or pass weight= "
                "to the step to have it average one loss for each row"
            )
        terms = jax.tree.map(lambda leaf: _term("each leaf of aux", leaf, inputs.weight, scale), aux)
        return _term("the loss", loss, inputs.weight, scale), (terms, new_buffers)

    def _parts(self, result: Any, buffers: Any) -> tuple[Any, Any, Any]:
        has_aux = self.options.has_aux
        names = ["loss", *(["buffers"] if buffers is not None else []), *(["aux"] if has_aux else [])]
        parts = result if isinstance(result, tuple) or len(names) > 1 else (result,)
        if not isinstance(parts, tuple) or len(parts) != len(names):
            have = f"{len(parts)} values" if isinstance(parts, tuple) else f"one {type(parts).__name__}"
            wanted = f"({', '.join(names)})" if len(names) > 1 else "the loss alone"
            hints = [] if has_aux else ["has_aux=True is for metrics"]
            hints += [] if buffers is not None else ["init takes the buffers that it is to return"]
            hint = f"; {', '.join(hints)}" if hints else ""
            raise TypeError(f"loss_fn is to return {wanted}, but it returned {have}{hint}")
        found = dict(zip(names, parts, strict=True))
        if buffers is not None:
            _require_same_types(buffers, found["buffers"])
        return found["loss"], found.get("buffers"), found.get("aux")


def _term(what: str, value: Any, weight: Any, scale: Any) -> jax.Array:
    value = jnp.asarray(value)
    value = value.astype(jnp.promote_types(value.dtype, jnp.float32))
    if weight is None:
        return (value * scale).astype(value.dtype)
    if value.shape != weight.shape:
        raise TypeError(
            f"with a weight of shape {weight.shape} a microbatch, {what} must have that shape, one value for each "
            f"row, but it has shape {value.shape}; leave the averaging to the step"
        )
    return jnp.sum(jnp.where(weight != 0, value * weight, 0)) * scale


def _require_same_types(old: Any, new: Any) -> None:
    def types(tree: Any) -> tuple[Any, list[Any]]:
        leaves, treedef = jax.tree.flatten(tree)
        return treedef, [(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves]

    if types(old) != types(new):
        raise TypeError(
            "loss_fn returned buffers of another structure, shape or dtype than it was given: "
            f"{jax.tree.map(jax.typeof, old)} became {jax.tree.map(jax.typeof, new)}"
        )
