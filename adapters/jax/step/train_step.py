"""A whole training step over all devices: the state goes in, the next one comes out."""

import contextlib
import dataclasses
import functools
import itertools
import json
import threading
import zlib
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from unified_ddp.errors import NonFiniteError, ReplicaMismatchError, UnevenDataError
from unified_ddp.jax.schema import leaf_name
from unified_ddp.jax.step.placement import auto_mesh, host_digests, per_replica, replicate, row_specs, split_rows
from unified_ddp.jax.step.processes import ProcessGathering
from unified_ddp.jax.step.replica_step import ReplicaStep, static_text
from unified_ddp.jax.step.waiting import Deadline, InFlight
from unified_ddp.plan import ParamSpec
from unified_ddp.ranks.construction import any_spec, check_construction
from unified_ddp.ranks.texts import shortened, tell_sides

if TYPE_CHECKING:
    from unified_ddp.jax.ddp import DistributedDataParallel

__all__ = ["TrainState", "TrainStep"]

_numbers = itertools.count()


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


class TrainStep:
    """A jitted step over all devices; made by `DistributedDataParallel.train_step`, which describes it.

    Attributes:
        mesh: the devices.
    """

    def __init__(
        self,
        ddp: "DistributedDataParallel",
        optimizer: Any,
        replica_step: ReplicaStep,
        mesh: Mesh | None,
        donate: bool,
        max_in_flight: int | None,
        timeout: float | None,
    ) -> None:
        from optax import with_extra_args_support  # the optimizer is optax's, so it is there

        self.mesh = auto_mesh(mesh, ddp.axis_name)
        self._ddp = ddp
        self._optimizer = with_extra_args_support(optimizer)
        self._replica_step = replica_step
        self._several = jax.process_count() > 1
        self._timeout = timeout
        self._unchanged = "" if donate else "State is unchanged. "
        self._calls = itertools.count()
        self._compiled: dict[Any, Any] = {}
        on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        deadline = Deadline(f"train_step {next(_numbers)}", timeout) if self._several and timeout else None
        # XLA runs a CPU computation in the thread that dispatches it if the process has one device.
        self._dispatch_deadline = deadline if on_cpu else None
        if max_in_flight is None:
            max_in_flight = 0 if on_cpu else 2  # several CPU devices abort in XLA's rendezvous when steps pile up
        self._in_flight = InFlight(max_in_flight, deadline, self._ended)
        replicated = NamedSharding(self.mesh, P())
        only_data = set(self.mesh.axis_names) == set(ddp.axis_name)
        self._state_sharding = replicated if only_data else None
        by_replica = NamedSharding(self.mesh, P(ddp.axis_name))
        rest = self._state_sharding
        self._jitted = jax.jit(
            self._traced,
            static_argnums=5,
            donate_argnums=(0,) if donate else (),
            out_shardings=(TrainState(rest, rest, rest, rest, by_replica, rest), replicated, None),
        )

    def init(self, params: Any, buffers: Any = None) -> TrainState:
        """Returns the state before the first step. Across processes, all start from those of process 0.

        Args:
            params: the pytree that the wrapper was made with. Arrays are copied.
            buffers: module state that the loss function takes and returns; None for none.

        Raises:
            TypeError: a leaf is no array.
            ConstructionMismatchError: (in every process) parameters, buffers or options differ between processes.
            StallError: a process did not come here.
        """
        with self._own_mesh():
            return self._init(params, buffers)

    def _init(self, params: Any, buffers: Any) -> TrainState:
        values = replicate({"params": params, "buffers": buffers}, self.mesh, "the state's")
        if self._several:
            transport = self._gathering("train_step's init")
            check_construction(transport, *self._compared(params, buffers), member="process")
            spread = jax.shard_map(
                self._ddp.sync_buffers, mesh=self.mesh, in_specs=P(), out_specs=P(), check_vma=False, **self._manual()
            )
            values = jax.jit(spread)(values)
        else:
            values = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=self._state_sharding)(values)
        trained = self._ddp.trained(values["params"])
        opt_state = jax.jit(self._optimizer.init, out_shardings=self._state_sharding)(trained)
        counts = replicate((jnp.int32(0), jnp.int32(0)), self.mesh, "counts")
        hook_state = per_replica(self._ddp.init_hook_state, self.mesh, self._ddp.axis_name)
        return TrainState(counts[0], values["params"], opt_state, values["buffers"], hook_state, counts[1])

    def __call__(
        self, state: TrainState, batch: Any, rng: Any = None, weights: Any = None, **static: Any
    ) -> tuple[TrainState, Any]:
        """Takes one step.

        Args:
            state: from `init` or the step before.
            batch: a pytree of arrays whose first axis are this process's rows; scalars are for all replicas.
            rng: a PRNG key. Each replica and microbatch gets one of its own, folded from this one, the state's step,
                the replica's number and the microbatch's; so the same key may be passed in every step.
            weights: of shape (rows, ...), such as a mask; `loss_fn` then returns one loss for each.
            static: hashable values that `loss_fn` takes as keyword arguments; each new one is compiled anew.

        Returns:
            The next state, and the mean loss; with `has_aux`, the pair of it and the mean aux.

        Raises:
            UnevenDataError: rows cannot be shared evenly; or (in every process, and nothing was changed) processes gave
                batches of different shapes, weights or a key in some only, or other static bools, numbers or strings.
            ReplicaMismatchError: (in every process) processes restored different states, or are at different steps.
            NonFiniteError: gradients are not finite, with `on_nonfinite="raise"`; nothing was changed.
            StallError: a step has not ended in time.
        """
        if not isinstance(state, TrainState):
            raise TypeError(f"step takes the state that init or the step before returned, not {type(state).__name__}")
        if isinstance(state.step, jax.core.Tracer):
            raise TypeError(
                "a train_step is jitted already, and places arrays on devices: call it outside jax.jit, scan and other "
                "transformations, or write the step by hand with value_and_grad"
            )
        step = next(self._calls)
        held = self._held(state)
        arguments = self._arguments(state, batch, rng, weights, held, static)
        if self._dispatch_deadline is None:
            with self._own_mesh():
                state, value, checks = self._jitted(*arguments)
        else:
            with self._own_mesh():
                compiled = self._compile(arguments)
            state, value, checks = self._dispatch_deadline(lambda: compiled(*arguments[:5]), step)
        told = _told(batch, weights, rng, static) if self._several else ""
        self._in_flight.add(step, (value, checks, told, held))
        return state, value

    def lower(
        self, state: TrainState, batch: Any, rng: Any = None, weights: Any = None, **static: Any
    ) -> jax.stages.Lowered:
        """Returns the step lowered for these arguments, to be looked at or compiled."""
        arguments = self._arguments(state, batch, rng, weights, self._held(state), static)
        with self._own_mesh():
            return self._jitted.lower(*arguments)

    def wait(self) -> None:
        """Waits for the steps in flight; raises what they have to raise."""
        self._in_flight.wait()

    def _own_mesh(self) -> contextlib.AbstractContextManager[Any]:
        """In place of one that the user has set: JAX maps over no other, and axes may be explicit."""
        user_has_one = not jax.sharding.get_abstract_mesh().empty
        return jax.set_mesh(self.mesh) if user_has_one else contextlib.nullcontext()

    def _held(self, state: TrainState) -> dict[str, int]:
        """Checksums of what was restored, which each process did by itself; the hook's state is each replica's own."""
        return host_digests(dataclasses.replace(state, hook_state=None), self.mesh) if self._several else {}

    def _arguments(
        self, state: TrainState, batch: Any, rng: Any, weights: Any, held: dict[str, int], static: dict[str, Any]
    ) -> Any:
        axes, microbatches = self._ddp.axis_name, self._replica_step.accumulate
        batch = split_rows(batch, self.mesh, axes, microbatches, "batch")
        weights = split_rows(weights, self.mesh, axes, microbatches, "weights")
        rng = replicate(rng, self.mesh, "rng")
        digest = zlib.crc32(json.dumps(held).encode()) >> 1 if held else 0
        return state, batch, weights, rng, np.int32(digest), tuple(sorted(static.items()))

    def _compile(self, arguments: Any) -> Any:
        """Compiles here, where the caller's settings hold, what another thread is to run."""
        leaves, treedef = jax.tree.flatten(arguments[:5])
        kinds = tuple((jax.typeof(leaf), getattr(leaf, "sharding", None)) for leaf in leaves)
        key = (treedef, kinds, arguments[5])
        if key not in self._compiled:
            self._compiled[key] = self._jitted.lower(*arguments).compile()
        return self._compiled[key]

    def _traced(
        self, state: TrainState, batch: Any, weights: Any, rng: Any, digest: Any, static: tuple[tuple[str, Any], ...]
    ) -> tuple[TrainState, Any, dict[str, jax.Array]]:
        import optax

        axes, replica_step = self._ddp.axis_name, self._replica_step
        mapped = jax.shard_map(
            functools.partial(replica_step, dict(static)),
            mesh=self.mesh,
            in_specs=(P(), P(), P(axes), row_specs(batch, axes), row_specs(weights, axes), P(), P(), P()),
            out_specs=(P(), P(), P(), P(), P(axes), replica_step.checks()),
            check_vma=False,  # loss functions that start a scan's carry from constants are refused otherwise
            **self._manual(),
        )
        loss, aux, grads, buffers, hook_state, found = mapped(
            state.params, state.buffers, state.hook_state, batch, weights, rng, state.step, digest
        )
        old = (state.params, state.opt_state, state.buffers, state.hook_state)
        trained = self._ddp.trained(state.params)
        updates, opt_state = self._optimizer.update(grads, state.opt_state, trained, value=loss)
        params = self._ddp.with_trained(state.params, optax.apply_updates(trained, updates))
        new = (params, opt_state, buffers, hook_state)
        skipped = state.skipped
        if found:
            refused = found.get("uneven", False) | found.get("apart", False)
            taken = found.get("finite", True) & jnp.logical_not(refused)
            new = jax.tree.map(lambda after, before: jnp.where(taken, after, before), new, old)
            skipped += 1 - taken.astype(skipped.dtype)
        state = TrainState(state.step + 1, *new, skipped)
        return state, (loss, aux) if replica_step.has_aux else loss, found

    def _manual(self) -> dict[str, Any]:
        """Axes of the mesh that hold no data are left to the compiler."""
        return {} if self._state_sharding is not None else {"axis_names": set(self._ddp.axis_name)}

    def _gathering(self, what: str) -> ProcessGathering:
        return ProcessGathering(what, self._timeout or threading.TIMEOUT_MAX)

    def _ended(self, step: int, result: tuple[Any, dict[str, jax.Array], str, dict[str, int]]) -> None:
        _, checks, told, held = result
        if "uneven" in checks and bool(checks["uneven"]):
            every = self._gathering("the report of uneven batches").all_gather_text(told)
            raise UnevenDataError(
                f"step {step}: processes gave batches or arguments that differ: {tell_sides(every, 'process')}. "
                f"{self._unchanged}Drop the remainder, or fill every process's batch up to the same number of rows "
                "with unified_ddp.jax.pad_batch; pass weights and rng in all or none, and the same static arguments."
            )
        if "apart" in checks and bool(checks["apart"]):
            raise ReplicaMismatchError(self._apart(step, held | {"step": int(checks["step"])}))
        if "bad" in checks and not bool(checks["finite"]):
            raise NonFiniteError(self._nonfinite(step, checks))

    def _apart(self, step: int, held: dict[str, int]) -> str:
        gathering = self._gathering("the report of states that differ")
        every = [json.loads(text) for text in gathering.all_gather_text(json.dumps(held))]
        names = dict.fromkeys(name for one in every for name in ("step", *one))
        sides = {name: tell_sides([str(one.get(name, "not restored")) for one in every], "process") for name in names}
        name = next(name for name in names if sides[name])
        what = "is" if name == "step" else "was restored with checksum"
        return (
            f"step {step}: processes gave states that differ: {name} {what} {sides[name]}. {self._unchanged}Restore "
            "the same state in every process, or make a new one with init, which takes that of process 0."
        )

    def _nonfinite(self, step: int, checks: dict[str, jax.Array]) -> str:
        names = self._ddp.trained_names()
        mine = {
            int(shard.index[0].start or 0): [name for name, bad in zip(names, shard.data[0], strict=True) if bad]
            for shard in checks["bad"].addressable_shards
        }
        gathering = self._gathering("the report of gradients that are not finite")
        every = [json.loads(text) for text in gathering.all_gather_text(json.dumps(mine))]
        bad = {int(replica): (p, found) for p, by in enumerate(every) for replica, found in by.items() if found}
        told = "; ".join(
            f"{_some(found)} on replica {replica}" + (f" (process {process})" if self._several else "")
            for replica, (process, found) in sorted(bad.items())
        )
        if not told:
            reduced = [name for name, bad in zip(names, checks["bad_mean"], strict=True) if bad]
            told = f"{_some(reduced)} in the mean over replicas, though on no replica: the sum overflowed"
        return (
            f"step {step}: gradients are not finite: {told}. State is unchanged; lower the learning rate, clip "
            'gradients, look at this batch, or pass on_nonfinite="skip".'
        )

    def _compared(self, params: Any, buffers: Any) -> tuple[list[ParamSpec], list[ParamSpec], dict[str, str]]:
        """Parameters, buffers and options, which must be equal in all processes."""
        options = {
            field.name: getattr(self._replica_step, field.name)
            for field in dataclasses.fields(self._replica_step)
            if field.name not in ("ddp", "loss_fn")
        }
        state = jax.eval_shape(self._optimizer.init, self._ddp.trained(params))
        options |= {"mesh": dict(self.mesh.shape), "jax": jax.__version__, "optimizer_state": _shapes(state)}
        told = {name: str(value) for name, value in (options | self._ddp.options()).items()}
        return _specs(params, set(self._ddp.trained_names())), _specs(buffers, set()), told


def _specs(tree: Any, trained: set[str]) -> list[ParamSpec]:
    return [
        any_spec(name, jnp.shape(leaf), str(jax.typeof(leaf).dtype), trainable=name in trained)
        for name, leaf in ((leaf_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree))
    ]


def _shapes(tree: Any) -> str:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return "(" + ", ".join(f"{leaf_name(path)}: {list(jnp.shape(leaf))}" for path, leaf in leaves) + ")"


def _told(batch: Any, weights: Any, rng: Any, static: dict[str, Any]) -> str:
    """What a process gave, in errors."""
    arguments = {"batch": batch} | ({} if weights is None else {"weights": weights})
    kinds = [
        f"{leaf_name(path)}: {list(jnp.shape(leaf))} {jax.typeof(leaf).dtype}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(arguments)
    ]
    rest = ["rng"] * (rng is not None) + [static_text(static)] * bool(static)
    return f"({', '.join(kinds + rest)})"


def _some(names: list[str]) -> str:
    return shortened([repr(name) for name in names], 3)
