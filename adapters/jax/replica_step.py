"""One replica's part of a training step, as it is traced: microbatches, weights, precision, checks."""

import dataclasses
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from unified_ddp.jax.axes import axis_size

if TYPE_CHECKING:
    from unified_ddp.jax.ddp import DistributedDataParallel

__all__ = ["BufferSync", "DivideBy", "OnNonfinite", "ReplicaStep"]

DivideBy = Literal["weights", "active_replicas", "replicas"]
BufferSync = Literal["broadcast", "mean"]
OnNonfinite = Literal["ignore", "skip", "raise"]


@dataclasses.dataclass(frozen=True)
class ReplicaStep:
    """Gives what one replica contributes to a step, and what all make of it. Attributes: see `train_step`."""

    ddp: "DistributedDataParallel"
    loss_fn: Callable[..., Any]
    has_aux: bool
    accumulate: int
    divide_by: DivideBy
    compute_dtype: Any
    buffer_sync: BufferSync
    on_nonfinite: OnNonfinite
    compare_batches: bool

    def __call__(
        self,
        static: dict[str, Any],
        params: Any,
        buffers: Any,
        hook_state: Any,
        batch: Any,
        weights: Any,
        rng: Any,
        step: Any,
    ) -> tuple[Any, Any, Any, Any, Any, dict[str, jax.Array]]:
        """Returns mean loss, mean aux, mean gradients, buffers, the comm hook's state and checks; called inside the
        mapped axis.

        The checks are those of `checks`: "uneven" (scalar: batches differ by process), "finite" (scalar), "bad" (shape
        (1, parameters): which of this replica's gradients are not finite) and "bad_mean" (shape (parameters,)).
        """
        axes = self.ddp.axis_name
        key = None if rng is None else jax.random.fold_in(jax.random.fold_in(rng, step), lax.axis_index(axes))
        scale = 1 / self.accumulate if weights is None else self._scale_of_weights(weights)
        local = self.ddp.value_and_grad(self._objective, has_aux=True, sync=False)

        def microbatch(buffers: Any, batch: Any, weights: Any, number: Any) -> tuple[Any, Any, Any, Any]:
            own = key if key is None or self.accumulate == 1 else jax.random.fold_in(key, number)
            (loss, (aux, buffers)), grads = local(params, buffers, batch, weights, own, scale, static)
            return loss, aux, grads, buffers

        if self.accumulate == 1:
            loss, aux, grads, buffers = microbatch(buffers, batch, weights, 0)
        else:
            loss, aux, grads, buffers = self._scan(microbatch, params, buffers, batch, weights)
        if hook_state is None:
            means = self.ddp.all_reduce(grads)
        else:
            means, hook_state = self.ddp.all_reduce(grads, hook_state)
        loss, aux = self.ddp.mean((loss, aux))
        found = self._check(jax.tree.leaves(grads), jax.tree.leaves(means), (batch, weights))
        return loss, aux, means, self._synced(buffers), hook_state, found

    def checks(self) -> dict[str, P]:
        """Which checks there are, with the axes over which they differ."""
        uneven = {"uneven": P()} if self.compare_batches else {}
        finite = {"finite": P()} if self.on_nonfinite != "ignore" else {}
        named = {"bad": P(self.ddp.axis_name), "bad_mean": P()} if self.on_nonfinite == "raise" else {}
        return uneven | finite | named

    def _scan(self, microbatch: Callable[..., Any], params: Any, buffers: Any, batch: Any, weights: Any) -> Any:
        """Sums over microbatches; the reduction comes after it."""
        leaves, treedef = jax.tree.flatten((batch, weights))
        rows = [i for i, leaf in enumerate(leaves) if leaf.ndim]
        count = self.accumulate
        split = [leaves[i].reshape(count, leaves[i].shape[0] // count, *leaves[i].shape[1:]) for i in rows]

        def body(carry: tuple[Any, Any], inputs: tuple[Any, Any]) -> tuple[Any, Any]:
            total, buffers = carry
            number, parts = inputs
            filled = list(leaves)
            for i, part in zip(rows, parts, strict=True):
                filled[i] = part
            loss, aux, grads, buffers = microbatch(buffers, *jax.tree.unflatten(treedef, filled), number)
            return (jax.tree.map(jnp.add, total, grads), buffers), (loss, aux)

        start = (self.ddp.zero_gradients(params), buffers)
        (grads, buffers), values = lax.scan(body, start, (jnp.arange(count), split))
        loss, aux = jax.tree.map(lambda value: value.sum(0), values)
        return loss, aux, grads, buffers

    def _objective(
        self, params: Any, buffers: Any, batch: Any, weights: Any, key: Any, scale: Any, static: dict[str, Any]
    ) -> tuple[Any, Any]:
        """The term of this microbatch in the sum over microbatches, whose mean over replicas is minimised."""
        buffers = jax.tree.map(lambda leaf: leaf, buffers)  # nnx variables made here may be changed here
        given = static | ({} if buffers is None else {"buffers": buffers}) | ({} if key is None else {"rng": key})
        result = self.loss_fn(self._lowered(params), self._lowered(batch), **given)
        loss, new_buffers, aux = self._parts(result, buffers)

        def term(what: str, value: Any) -> jax.Array:
            value = jnp.asarray(value)
            value = value.astype(jnp.promote_types(value.dtype, jnp.float32))
            if weights is None:
                return value if self.accumulate == 1 else value * scale
            if value.shape != weights.shape:
                raise TypeError(
                    f"with weights of shape {weights.shape} a microbatch, {what} must have that shape, one value for "
                    f"each weight, but it has shape {value.shape}; leave the averaging to the step"
                )
            return jnp.sum(jnp.where(weights != 0, value * weights, 0)) * scale

        if weights is None and jnp.ndim(loss):
            raise TypeError(
                f"loss_fn returned a loss of shape {jnp.shape(loss)}; return the mean over the batch, or pass "
                "weights to the step to have it average one loss for each weight"
            )
        return term("the loss", loss), (jax.tree.map(lambda leaf: term("each leaf of aux", leaf), aux), new_buffers)

    def _parts(self, result: Any, buffers: Any) -> tuple[Any, Any, Any]:
        names = ["loss", *(["buffers"] if buffers is not None else []), *(["aux"] if self.has_aux else [])]
        parts = result if len(names) > 1 else (result,)
        if not isinstance(parts, tuple) or len(parts) != len(names):
            have = f"{len(parts)} values" if isinstance(parts, tuple) else f"one {type(parts).__name__}"
            raise TypeError(f"loss_fn is to return ({', '.join(names)}), but it returned {have}")
        found = dict(zip(names, parts, strict=True))
        if buffers is not None:
            _require_same_types(buffers, found["buffers"])
        return found["loss"], found.get("buffers"), found.get("aux")

    def _lowered(self, tree: Any) -> Any:
        if self.compute_dtype is None:
            return tree

        def cast(leaf: Any) -> Any:
            floating = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
            return leaf.astype(self.compute_dtype) if floating else leaf

        return jax.tree.map(cast, tree)

    def _scale_of_weights(self, weights: jax.Array) -> jax.Array:
        """What this replica's weighted sum is multiplied with, so that the mean over replicas is the one asked for."""
        axes = self.ddp.axis_name
        own = jnp.sum(weights.astype(jnp.result_type(float)))
        if self.divide_by == "weights":
            return axis_size(axes) * _inverse(lax.psum(own, axes))
        if self.divide_by == "replicas":
            return _inverse(own)
        active = lax.psum((own > 0).astype(own.dtype), axes)
        return axis_size(axes) * _inverse(own) * _inverse(active)

    def _synced(self, buffers: Any) -> Any:
        synced = self.ddp.sync_buffers(buffers)
        if self.buffer_sync == "broadcast":
            return synced
        means = self.ddp.mean([x for x in jax.tree.leaves(buffers) if jnp.issubdtype(x.dtype, jnp.inexact)])
        rest = iter(means)
        return jax.tree.map(lambda x: next(rest) if jnp.issubdtype(x.dtype, jnp.inexact) else x, synced)

    def _check(self, grads: list[jax.Array], means: list[jax.Array], batch: Any) -> dict[str, jax.Array]:
        found, words = {}, []
        if self.compare_batches:
            shapes = [(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(batch)]
            fingerprint = zlib.crc32(repr(shapes).encode()) >> 1
            words = [jnp.int32(fingerprint), jnp.int32(-fingerprint)]  # equal everywhere if the maxima are opposite
        if self.on_nonfinite != "ignore":
            bad = jnp.stack([~jnp.all(jnp.isfinite(grad)) for grad in grads])
            bad_mean = jnp.stack([~jnp.all(jnp.isfinite(mean)) for mean in means])
            words.append(jnp.any(bad).astype(jnp.int32))
        if not words:
            return {}
        most = lax.pmax(jnp.stack(words), self.ddp.axis_name)
        if self.compare_batches:
            found["uneven"] = most[0] != -most[1]
        if self.on_nonfinite != "ignore":
            found["finite"] = (most[-1] == 0) & ~jnp.any(bad_mean)
        if self.on_nonfinite == "raise":
            found |= {"bad": bad[None], "bad_mean": bad_mean}
        return found


def _inverse(value: jax.Array) -> jax.Array:
    return jnp.where(value > 0, 1 / jnp.where(value > 0, value, 1), 0)


def _require_same_types(old: Any, new: Any) -> None:
    def types(tree: Any) -> tuple[Any, list[Any]]:
        leaves, treedef = jax.tree.flatten(tree)
        return treedef, [(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves]

    if types(old) != types(new):
        raise TypeError(
            "loss_fn returned buffers of another structure, shape or dtype than it was given: "
            f"{jax.tree.map(jax.typeof, old)} became {jax.tree.map(jax.typeof, new)}"
        )
