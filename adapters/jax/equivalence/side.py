"""A JAX model with its loss function and optimizer, as one side of a pair."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import unified_ddp
from unified_ddp.equivalence.batches import flatten
from unified_ddp.equivalence.errors import EquivalenceError
from unified_ddp.equivalence.results import SideInfo
from unified_ddp.equivalence.side import Arrays, Evaluation, Reduction, TensorInfo, Trajectory
from unified_ddp.jax.equivalence.arrays import batch_in, cast, precision, scalar, to_numpy
from unified_ddp.jax.equivalence.programs import Named, program_of
from unified_ddp.jax.equivalence.reduction import default_layer, reduce_by_step, reduce_on_devices


class JaxSide:
    """A JAX model as one side of a pair.

    Args:
        params: a pytree of parameters (flax linen: variables["params"]), an equinox module, or a flax nnx module.
        loss_fn: called as loss_fn(params, batch), for modules loss_fn(module, batch), with a batch of JAX arrays;
            returns the loss, or (loss, outputs), where outputs are an array or a tree of arrays to be compared as well.
            With `buffers`, called as loss_fn(params, batch, buffers=buffers), it returns (loss, buffers) or
            (loss, buffers, outputs), as under `train_step`.
        optimizer: optax's, for `params`; gradients come to it as `jax.grad` gives them.
        buffers: module state outside the parameters, such as flax linen's variables["batch_stats"].
        ddp: called with a dict of parameters by name for the reduced rung; returns the
            `unified_ddp.jax.DistributedDataParallel` (over the axis "data") that reduces them. None takes its defaults.
    """

    framework = "jax"

    def __init__(
        self,
        params: Any,
        loss_fn: Callable[..., Any],
        optimizer: Any = None,
        buffers: Any = None,
        ddp: Callable[[dict[str, Any]], Any] | None = None,
    ) -> None:
        self.program = program_of(params, loss_fn, buffers)
        self.loss_fn, self.optimizer, self.ddp = loss_fn, optimizer, ddp
        self._jitted: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_jitted": {}}

    @property
    def has_optimizer(self) -> bool:
        """See `Side`."""
        return self.optimizer is not None

    def tensors(self) -> tuple[TensorInfo, ...]:
        """See `Side`."""
        return self.program.tensors()

    def values(self) -> Arrays:
        """See `Side`."""
        held = {**self.program.params.values(), **self.program.buffers.values()}
        return {name: to_numpy(leaf) for name, leaf in held.items()}

    def evaluate(self, values: Arrays, batch: Any, dtype: str, *, gradients: bool = True) -> Evaluation:
        """See `Side`."""
        with precision(dtype):
            params, buffers = self.placed(values, dtype)
            name = "gradients" if gradients else "forward"
            loss, outputs, new, grads = self._jit(name, self._gradients if gradients else self._forward)(
                params, buffers, batch_in(batch, dtype)
            )
            return Evaluation(
                outputs={key: to_numpy(value) for key, value in flatten(outputs, "output").items()},
                loss=to_numpy(loss),
                gradients={key: np.conj(to_numpy(grad)) for key, grad in grads.items()},
                buffers={key: to_numpy(value) for key, value in new.items()},
            )

    def _jit(self, name: str, function: Callable[..., Any]) -> Any:
        if name not in self._jitted:
            self._jitted[name] = jax.jit(function)
        return self._jitted[name]

    def _forward(self, params: Named, buffers: Named, batch: Any) -> tuple[Any, Any, Named, Named]:
        loss, outputs, new = self.program.call(params, buffers, batch)
        return scalar(loss), outputs, new, {}

    def _gradients(self, params: Named, buffers: Named, batch: Any) -> tuple[Any, Any, Named, Named]:
        def loss_of(params: Named) -> tuple[Any, tuple[Any, Named]]:
            loss, outputs, new = self.program.call(params, buffers, batch)
            return scalar(loss), (outputs, new)

        (loss, (outputs, new)), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        return loss, outputs, new, grads

    def placed(self, values: Arrays, dtype: str) -> tuple[Named, Named]:
        """Returns parameters and buffers as JAX arrays of the dtype; what `values` lacks is as the user gave it."""
        return tuple(  # type: ignore[return-value]
            {name: jnp.asarray(cast(to_numpy(values.get(name, leaf)), dtype)) for name, leaf in tree.values().items()}
            for tree in (self.program.params, self.program.buffers)
        )

    def randomness(self, values: Arrays, batch: Any) -> str:
        """See `Side`."""
        return self.program.randomness()

    def reduce(
        self, values: Arrays, shards: Sequence[Any], dtype: str, buckets: Sequence[Sequence[str]] | None = None
    ) -> Reduction:
        """See `Side`."""
        return reduce_on_devices(self, values, shards, dtype, buckets)

    def reduce_by(
        self, step: Callable[..., Any] | None, values: Arrays, batch: Any, shards: Sequence[Any], dtype: str
    ) -> Reduction:
        """See `Side`."""
        assert step is not None  # check_gradients has seen to it
        return reduce_by_step(self, step, values, batch, shards, dtype)

    def wrap(self, params: Named, buckets: Sequence[Sequence[str]] | None) -> Any:
        """Returns the layer that reduces the gradients of these parameters, in these buckets if they are given."""
        return default_layer(params, buckets) if self.ddp is None else self.ddp(params)

    def modules(self) -> set[str]:
        """Returns the names of the Python modules that define what this side holds."""
        held = {getattr(part, "__module__", None) for part in (self.loss_fn, self.ddp)} | self.program.modules()
        return {name for name in held if name}

    def update(self, values: Arrays, gradients: Sequence[Arrays], dtype: str) -> tuple[Arrays, ...]:
        """See `Side`."""
        with precision(dtype):
            params, _ = self.placed(values, dtype)
            state = self._optimizer().init(self.program.params.build(params, others=False))
            step = self._jit("update", self._updated)
            states = []
            for grads in gradients:
                native = {name: jnp.asarray(np.conj(cast(grads[name], dtype))) for name in params}
                params, state = step(params, state, native)
                states.append({name: to_numpy(param) for name, param in params.items()})
            return tuple(states)

    def train(self, values: Arrays, batches: Sequence[Any], dtype: str) -> Trajectory:
        """See `Side`."""
        with precision(dtype):
            params, buffers = self.placed(values, dtype)
            state = self._optimizer().init(self.program.params.build(params, others=False))
            step = self._jit("train", self._trained)
            losses, parameters, kept = [], [], []
            for batch in batches:
                loss, params, state, buffers = step(params, state, buffers, batch_in(batch, dtype))
                losses.append(float(loss))
                parameters.append({name: to_numpy(param) for name, param in params.items()})
                kept.append({name: to_numpy(buffer) for name, buffer in buffers.items()})
            return Trajectory(tuple(losses), tuple(parameters), tuple(kept))

    def _trained(self, params: Named, state: Any, buffers: Named, batch: Any) -> tuple[Any, Named, Any, Named]:
        loss, _, new, grads = self._gradients(params, buffers, batch)
        params, state = self._updated(params, state, grads)
        return loss, params, state, new

    def _updated(self, params: Named, state: Any, grads: Named) -> tuple[Named, Any]:
        import optax

        tree = self.program.params
        ours = tree.build(params, others=False)
        updates, state = self._optimizer().update(tree.build(grads, others=False), state, ours)
        return tree.named(optax.apply_updates(ours, updates)), state

    def _optimizer(self) -> Any:
        if self.optimizer is None:
            raise EquivalenceError("the JAX side has no optimizer; give JaxSide(..., optimizer=...)")
        return self.optimizer

    def info(self) -> SideInfo:
        """See `Side`."""
        params = self.program.params.values()
        packages = ("flax", "equinox", "optax")
        versions = {n: str(getattr(sys.modules[n], "__version__", "?")) for n in packages if n in sys.modules}
        flags = {
            "default matmul precision": str(jax.config.jax_default_matmul_precision or "default"),  # type: ignore[attr-defined]
            "x64": str(jax.config.jax_enable_x64),  # type: ignore[attr-defined]
            "XLA_FLAGS": _xla_flags(),
        }
        return SideInfo(
            framework="jax",
            versions={"jax": jax.__version__, **versions, "unified_ddp": unified_ddp.__version__},
            flags=flags,
            devices=(str(jax.devices()[0]),),
            parameters=sum(int(np.prod(p.shape)) for p in params.values()),
            tensors=len(params),
        )


def _xla_flags() -> str:
    import os

    return os.environ.get("XLA_FLAGS", "")
