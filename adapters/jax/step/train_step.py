"""A whole training step over all devices: the state goes in, the next one comes out."""

import contextlib
import dataclasses
import itertools
import json
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from unified_ddp.jax.averaging import GradientAveraging
from unified_ddp.jax.step.construction import check_processes
from unified_ddp.jax.step.objective import Objective
from unified_ddp.jax.step.options import StepOptions
from unified_ddp.jax.step.placement import auto_mesh, host_digests, per_replica, replicate, split_rows
from unified_ddp.jax.step.processes import ProcessGathering
from unified_ddp.jax.step.replica_step import ReplicaStep
from unified_ddp.jax.step.reports import Dispatched, Reports
from unified_ddp.jax.step.state import StepInputs, TrainState
from unified_ddp.jax.step.update import Update, manual_axes
from unified_ddp.jax.step.waiting import Deadline, InFlight

_numbers = itertools.count()


class TrainStep:
    """A jitted step over all devices; made by `DistributedDataParallel.train_step`, which describes it.

    Attributes:
        mesh: the devices.
    """

    def __init__(
        self,
        averaging: GradientAveraging,
        loss_fn: Callable[..., Any],
        optimizer: Any,
        mesh: Mesh | None,
        options: StepOptions,
    ) -> None:
        from optax import with_extra_args_support  # the optimizer is optax's, so it is there

        self.mesh = auto_mesh(mesh, averaging.axis_name)
        self._averaging = averaging
        self._optimizer = with_extra_args_support(optimizer)
        self._options = options
        self._several = jax.process_count() > 1
        self._calls = itertools.count()
        self._compiled: dict[Any, Any] = {}
        self._in_flight, self._dispatch_deadline = self._waiting()
        axes = averaging.axis_name
        replicated, by_replica = NamedSharding(self.mesh, P()), NamedSharding(self.mesh, P(axes))
        # Axes that hold no data are left to the compiler.
        self._state_sharding = rest = replicated if set(self.mesh.axis_names) == set(axes) else None
        replica_step = ReplicaStep(averaging, Objective(loss_fn, options), options, self._several)
        self._jitted = jax.jit(
            Update(averaging, self._optimizer, replica_step, self.mesh).step,
            donate_argnums=(0,) if options.donate else (),
            out_shardings=(TrainState(rest, rest, rest, rest, by_replica, rest), replicated, None),
        )

    def _waiting(self) -> tuple[InFlight, Deadline | None]:
        """What bounds the steps in flight, and what dispatches steps if that may wait for other processes."""
        options, on_cpu = self._options, self.mesh.devices.flat[0].platform == "cpu"
        limit = 0 if options.on_nonfinite == "raise" else options.max_in_flight
        if limit is None:
            limit = 0 if on_cpu else 2  # several CPU devices abort in XLA's rendezvous when steps pile up
        timeout = options.timeout if self._several else None
        deadline = Deadline(f"train_step {next(_numbers)}", timeout) if timeout else None
        judge = Reports(self._averaging.planned.names, options).judge
        # XLA runs a CPU computation in the thread that dispatches it if the process has one device.
        return InFlight(limit, deadline, judge), deadline if on_cpu else None

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
            values = self._copied(replicate({"params": params, "buffers": buffers}, self.mesh, "the state's"))
            trained = self._averaging.planned.find(values["params"]).trained
            opt_state = jax.jit(self._optimizer.init, out_shardings=self._state_sharding)(trained)
            counts = replicate((jnp.int32(0), jnp.int32(0)), self.mesh, "counts")
            hook_state = per_replica(self._averaging.init_hook_state, self.mesh, self._averaging.axis_name)
            return TrainState(counts[0], values["params"], opt_state, values["buffers"], hook_state, counts[1])

    def _copied(self, values: dict[str, Any]) -> dict[str, Any]:
        """Those of process 0, once all are found to be built alike."""
        if not self._several:
            return jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=self._state_sharding)(values)
        averaging, options = self._averaging, self._options.compared() | {"mesh": dict(self.mesh.shape)}
        check_processes(
            ProcessGathering("train_step's init", self._options.timeout),
            values["params"],
            values["buffers"],
            jax.eval_shape(self._optimizer.init, averaging.planned.find(values["params"]).trained),
            averaging.planned.names,
            options | averaging.compared(),
        )
        manual = manual_axes(self.mesh, averaging.axis_name)
        spread = jax.shard_map(
            averaging.sync_buffers, mesh=self.mesh, in_specs=P(), out_specs=P(), check_vma=False, **manual
        )
        return jax.jit(spread)(values)

    def __call__(
        self, state: TrainState, batch: Any, rng: Any = None, weight: Any = None, **static: Any
    ) -> tuple[TrainState, Any]:
        """Takes one step.

        Args:
            state: from `init` or the step before.
            batch: a pytree of arrays whose first axis are this process's rows; scalars are for all replicas.
            rng: a PRNG key. Each replica and microbatch gets one of its own, folded from this one, the state's step,
                the replica's number and the microbatch's; so the same key may be passed in every step.
            weight: of each row, shape (rows, ...), such as a mask; `loss_fn` then returns one loss for each.
            static: hashable values that `loss_fn` takes as keyword arguments; each new one is compiled anew.

        Returns:
            The next state, and the mean loss; with `has_aux`, the pair of it and the mean aux.

        Raises:
            UnevenDataError: rows cannot be shared evenly; or (in every process, and nothing was changed) processes gave
                batches of different shapes, a weight or a key in some only, or other static bools, numbers or strings.
            ReplicaMismatchError: (in every process) processes restored different states, or are at different steps.
            MisuseError: the optimizer's state is another optimizer's, or the optimizer asks for arguments that are not
                there; nothing was changed.
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
        call = next(self._calls)
        held = self._held(state)
        given = StepInputs(batch, weight, rng, None, tuple(sorted(static.items())))
        state, value, checks = self._run(call, state, self._placed(given, held))
        self._in_flight.add(call, Dispatched(value, checks, given.text() if self._several else "", held))
        return state, value

    def lower(
        self, state: TrainState, batch: Any, rng: Any = None, weight: Any = None, **static: Any
    ) -> jax.stages.Lowered:
        """Returns the step lowered for these arguments, to be looked at or compiled."""
        given = StepInputs(batch, weight, rng, None, tuple(sorted(static.items())))
        with self._own_mesh():
            return self._jitted.lower(state, self._placed(given, self._held(state)))

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

    def _placed(self, given: StepInputs, held: dict[str, int]) -> StepInputs:
        axes, microbatches = self._averaging.axis_name, self._options.accumulate
        digest = np.int32(zlib.crc32(json.dumps(held).encode()) >> 1 if held else 0)
        batch = split_rows(given.batch, self.mesh, axes, microbatches, "batch")
        weight = split_rows(given.weight, self.mesh, axes, microbatches, "weight")
        return StepInputs(batch, weight, replicate(given.rng, self.mesh, "rng"), digest, given.static)

    def _run(self, call: int, state: TrainState, inputs: StepInputs) -> tuple[TrainState, Any, dict[str, jax.Array]]:
        if self._dispatch_deadline is None:
            with self._own_mesh():
                return self._jitted(state, inputs)
        with self._own_mesh():
            compiled = self._compile(state, inputs)
        return self._dispatch_deadline(lambda: compiled(state, inputs), call)

    def _compile(self, state: TrainState, inputs: StepInputs) -> Any:
        """Compiles here, where the caller's settings hold, what another thread is to run."""
        leaves, treedef = jax.tree.flatten((state, inputs))
        kinds = tuple((jax.typeof(leaf), getattr(leaf, "sharding", None)) for leaf in leaves)
        if (treedef, kinds) not in self._compiled:
            self._compiled[treedef, kinds] = self._jitted.lower(state, inputs).compile()
        return self._compiled[treedef, kinds]
