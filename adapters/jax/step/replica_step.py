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
from unified_ddp.jax.buffers import broadcast
from unified_ddp.jax.schema import leaf_name

if TYPE_CHECKING:
    from unified_ddp.jax.ddp import DistributedDataParallel

__all__ = ["BufferSync", "DivideBy", "OnNonfinite", "ReplicaStep", "static_text"]

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
        digest: Any,
    ) -> tuple[Any, Any, Any, Any, Any, dict[str, jax.Array]]:
        """Returns mean loss, mean aux, mean gradients, buffers, the comm hook's state and checks; called inside the
        mapped axis.

        The checks are those of `checks`: "uneven" (scalar: arguments differ by process), "apart" (scalar: states do),
        "step" (scalar: of this process's state), "finite" (scalar), "bad" (shape (1, parameters): which of this
        replica's gradients are not finite) and "bad_mean" (shape (parameters,)).
        """
        axes = self.ddp.axis_name
        key = None if rng is None else jax.random.fold_in(jax.random.fold_in(rng, step), lax.axis_index(axes))
        told = [jnp.int32(_fingerprint(batch, weights, rng, static)), step, digest] if self.compare_batches else []
        every_told, every_weight = self._by_replica(told, weights)
        scale = 1 / self.accumulate if weights is None else self._scale_of_weights(every_weight)
        differ = jnp.any(every_told != every_told[:1], axis=0)
        if self.compare_batches:  # all processes are to learn of it before they meet in other collectives than this
            scale = jnp.where(jnp.any(differ), 0, scale)
        local = self.ddp.value_and_grad(self._objective, has_aux=True, sync=False)

        def microbatch(buffers: Any, batch: Any, weights: Any, number: Any) -> tuple[Any, Any, Any, Any]:
            own = key if key is None or self.accumulate == 1 else jax.random.fold_in(key, number)
            (loss, (aux, after)), grads = local(params, buffers, batch, weights, own, scale, static)
            if weights is not None:  # padding alone leaves nothing: no buffers, and no zero times infinity
                some = jnp.any(weights != 0)
                after = jax.tree.map(lambda new, old: jnp.where(some, new, old), after, buffers)
                grads = jax.tree.map(lambda grad: jnp.where(some, grad, 0), grads)
            return loss, aux, grads, after

        if self.accumulate == 1:
            loss, aux, grads, buffers = microbatch(buffers, batch, weights, 0)
        else:
            loss, aux, grads, buffers = self._scan(microbatch, params, buffers, batch, weights)
        if hook_state is None:
            means = self.ddp.all_reduce(grads)
        else:
            means, hook_state = self.ddp.all_reduce(grads, hook_state)
        loss, aux = self.ddp.mean((loss, aux))
        found = self._check(jax.tree.leaves(grads), jax.tree.leaves(means))
        if self.compare_batches:
            found |= {"uneven": differ[0], "apart": differ[1] | differ[2], "step": step}
        return loss, aux, means, self._synced(buffers, every_weight), hook_state, found

    def checks(self) -> dict[str, P]:
        """Which checks there are, with the axes over which they differ."""
        uneven = {"uneven": P(), "apart": P(), "step": P()} if self.compare_batches else {}
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
                return (value * scale).astype(value.dtype)
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
        parts = result if isinstance(result, tuple) or len(names) > 1 else (result,)
        if not isinstance(parts, tuple) or len(parts) != len(names):
            have = f"{len(parts)} values" if isinstance(parts, tuple) else f"one {type(parts).__name__}"
            wanted = f"({', '.join(names)})" if len(names) > 1 else "the loss alone"
            hints = [] if self.has_aux else ["has_aux=True is for metrics"]
            hints += [] if buffers is not None else ["init takes the buffers that it is to return"]
            hint = f"; {', '.join(hints)}" if hints else ""
            raise TypeError(f"loss_fn is to return {wanted}, but it returned {have}{hint}")
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

    def _by_replica(self, told: list[Any], weights: Any) -> tuple[jax.Array, Any]:
        """Returns what each replica told, shape (replicas, len(told)), and the sum of each one's weights, or None.

        It is one small all-reduce, and across processes, the first one of every step.
        """
        axes = self.ddp.axis_name
        own = jnp.float32(0) if weights is None else jnp.sum(weights.astype(jnp.result_type(float)))
        bits = lax.bitcast_convert_type(own, jnp.int32).reshape(-1)
        row = jnp.concatenate([jnp.asarray(word, jnp.int32).reshape(1) for word in told] + [bits])
        table = jnp.zeros((axis_size(axes), len(row)), jnp.int32).at[lax.axis_index(axes)].set(row)
        if told or weights is not None:
            table = lax.psum(table, axes)
        every_bits = table[:, len(told) :].reshape(-1, *([2] if own.dtype.itemsize == 8 else []))
        every_weight = None if weights is None else lax.bitcast_convert_type(every_bits, own.dtype)
        return table[:, : len(told)], every_weight

    def _scale_of_weights(self, every_weight: jax.Array) -> jax.Array:
        """What this replica's weighted sum is multiplied with, so that the mean over replicas is the one asked for."""
        size, own = len(every_weight), every_weight[lax.axis_index(self.ddp.axis_name)]
        if self.divide_by == "weights":
            return size * _inverse(jnp.sum(every_weight))
        if self.divide_by == "replicas":
            return _inverse(own)
        return size * _inverse(own) * _inverse(jnp.sum((every_weight > 0).astype(own.dtype)))

    def _synced(self, buffers: Any, every_weight: Any) -> Any:
        """Those of the first replica, or their mean; of those that have any weight, as the others saw no data."""
        axes = self.ddp.axis_name
        active = jnp.ones(axis_size(axes), bool) if every_weight is None else every_weight > 0
        leaves, treedef = jax.tree.flatten(buffers)
        averaged = [self.buffer_sync == "mean" and jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves]
        kept = [x for x, is_averaged in zip(leaves, averaged, strict=True) if not is_averaged]
        firsts = iter(broadcast(kept, axes, jnp.argmax(active), self.ddp.strategy))
        count = jnp.sum(active)
        share = jnp.where(count > 0, active[lax.axis_index(axes)] * len(active) / jnp.maximum(count, 1), 1)
        shares = [x * share.astype(x.dtype) for x, is_averaged in zip(leaves, averaged, strict=True) if is_averaged]
        means = iter(self.ddp.mean(shares))
        return jax.tree.unflatten(treedef, [next(means if is_averaged else firsts) for is_averaged in averaged])

    def _check(self, grads: list[jax.Array], means: list[jax.Array]) -> dict[str, jax.Array]:
        if self.on_nonfinite == "ignore":
            return {}
        bad = jnp.stack([~jnp.all(jnp.isfinite(grad)) for grad in grads])
        bad_mean = jnp.stack([~jnp.all(jnp.isfinite(mean)) for mean in means])
        most = lax.pmax(jnp.any(bad).astype(jnp.int32), self.ddp.axis_name)
        found = {"finite": (most == 0) & ~jnp.any(bad_mean)}
        return found | ({"bad": bad[None], "bad_mean": bad_mean} if self.on_nonfinite == "raise" else {})


def _fingerprint(batch: Any, weights: Any, rng: Any, static: dict[str, Any]) -> int:
    """A number of 31 bits for what must be equal in all processes; of static values, those that can be compared."""
    leaves = jax.tree_util.tree_leaves_with_path((batch, weights))
    shapes = [(leaf_name(path), leaf.shape, str(leaf.dtype)) for path, leaf in leaves]
    return zlib.crc32(repr((shapes, rng is None, static_text(static))).encode()) >> 1


def static_text(static: dict[str, Any]) -> str:
    """Returns names and values, of values that have no text of their own the type."""
    plain = (bool, int, float, str, type(None))
    told = [f"{n}={v!r}" if isinstance(v, plain) else f"{n}: {type(v).__name__}" for n, v in sorted(static.items())]
    return ", ".join(told)


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
