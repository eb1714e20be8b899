"""What goes into a step, and what comes out of it."""

import dataclasses
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from unified_ddp.jax.pytrees.schema import leaf_name
from unified_ddp.jax.step.placement import row_specs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What a training step takes and gives, equal on all devices, save for `hook_state`.

    Attributes:
        step: number of steps taken, skipped ones included; int32 scalar.
        params: the pytree of parameters.
        opt_state: the optimizer's, for the trained parameters.
        buffers: module state such as batch statistics; None if there is none.
        hook_state: the comm hook's, with a leading axis of replicas, as each holds its own; None if there is none.
        skipped: number of steps that left everything as it was, as gradients were not finite; int32 scalar.
    """

    step: Any
    params: Any
    opt_state: Any
    buffers: Any
    hook_state: Any
    skipped: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepInputs:
    """What one call gives a step beside the state: of a process, then of one replica, then of one microbatch.

    Attributes:
        batch: the pytree of rows, and of scalars.
        weight: of each row, shape (rows, ...); None if there are none.
        rng: the key; None if there is none.
        digest: checksum of the parts of the state that this process restored by itself; int32 scalar.
        static: names and values that `loss_fn` takes as keyword arguments, sorted; a new value is compiled anew.
    """

    batch: Any
    weight: Any
    rng: Any
    digest: Any
    static: tuple[tuple[str, Any], ...] = dataclasses.field(metadata={"static": True})

    def specs(self, axes: tuple[str, ...]) -> "StepInputs":
        """Returns how each part is split over the replicas."""
        return StepInputs(row_specs(self.batch, axes), row_specs(self.weight, axes), P(), P(), self.static)

    def of_replica(self, step: Any, axes: tuple[str, ...]) -> "StepInputs":
        """Returns the inputs with this replica's own key for this step."""
        if self.rng is None:
            return self
        rng = jax.random.fold_in(jax.random.fold_in(self.rng, step), lax.axis_index(axes))
        return dataclasses.replace(self, rng=rng)

    def of_microbatches(self, count: int) -> "StepInputs":
        """Returns the inputs of `count` microbatches, stacked along a new first axis; each has a key of its own."""

        def split(leaf: Any) -> Any:
            rows = (leaf.shape[0] // count, *leaf.shape[1:]) if leaf.ndim else ()
            return leaf.reshape(count, *rows) if leaf.ndim else jnp.broadcast_to(leaf, (count,))

        rng = self.rng
        if rng is not None:
            rng = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(rng, jnp.arange(count))
        batch, weight, digest = jax.tree.map(split, (self.batch, self.weight, self.digest))
        return StepInputs(batch, weight, rng, digest, self.static)

    def fingerprint(self) -> int:
        """Returns a number of 31 bits for what must be equal in all processes."""
        return zlib.crc32(self.text().encode()) >> 1

    def text(self) -> str:
        """Returns in words what must be equal: shapes and dtypes, whether there is a key, and static values.

        Of values that have no text of their own, it is the type.
        """
        given = {"batch": self.batch} | ({} if self.weight is None else {"weight": self.weight})
        kinds = [
            f"{leaf_name(path)}: {list(jnp.shape(leaf))} {jax.typeof(leaf).dtype}"
            for path, leaf in jax.tree_util.tree_leaves_with_path(given)
        ]
        plain = (bool, int, float, str, type(None))
        static = [f"{n}={v!r}" if isinstance(v, plain) else f"{n}: {type(v).__name__}" for n, v in self.static]
        return f"({', '.join([*kinds, *(['rng'] if self.rng is not None else []), *static])})"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepResults:
    """What the replicas make of a step together, before the optimizer sees it.

    Attributes:
        loss: the mean.
        aux: the means of what `loss_fn` returned beside.
        grads: the mean gradients, None where there is none.
        buffers: of the next state.
        hook_state: of the next state.
        checks: those that the options and processes ask for of "uneven" (scalar: arguments differ by process), "apart"
            (scalar: states do), "step" (scalar: of this process's state), "finite" (scalar) and "bad_mean" (shape
            (parameters,): which mean gradients are not finite).
        bad: which of this replica's gradients are not finite, shape (1, parameters); None if nobody asks.
    """

    loss: Any
    aux: Any
    grads: Any
    buffers: Any
    hook_state: Any
    checks: Any
    bad: Any
