"""What the tests of train_step share: a mesh, and plain steps to compare with."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_cases import make_batch, mesh, oracle
from support.hook_cases import BUCKET_BYTES, SHAPES, HostRanks, gradients

from unified_ddp.hooks import SharedHook
from unified_ddp.jax import DistributedDataParallel, TrainStep
from unified_ddp.jax.comm_hooks.shared import layouts_of
from unified_ddp.plan import MIB

RATE = 0.1


def batches(count: int = 3, rows: int = 8) -> list[Any]:
    x, y = make_batch(count * rows).values()
    x = jnp.tanh(x)
    return [{"x": x[i * rows : (i + 1) * rows], "y": y[i * rows : (i + 1) * rows]} for i in range(count)]


def make_step(params: Any, loss: Any, size: int, optimizer: Any = None, **options: Any) -> TrainStep:
    """A step over CPU devices; options are those of the wrapper and of its train_step."""
    names = ("trainable", "reduce_dtype", "strategy", "comm_hook", "bucket_cap_mb")
    own = {name: options.pop(name) for name in names if name in options}
    ddp = DistributedDataParallel(params, **own)
    options = {"mesh": mesh(size, "data")} | options
    return ddp.train_step(loss, optimizer or optax.sgd(RATE, momentum=0.9), **options)


def run(step: Any, params: Any, data: list[Any], buffers: Any = None, **arguments: Any) -> Any:
    """Returns the last state, and what each step gave beside it."""
    state, values = step.init(params, buffers), []
    for batch in data:
        state, value = step(state, batch, **arguments)
        values.append(value)
    return state, values


def plain_steps(
    loss: Callable[..., Any], params: Any, optimizer: Any, batches: list[Any], parts: int
) -> tuple[Any, list[float]]:
    """Parameters and mean losses of plain steps with the mean of the gradients of equal parts of each batch."""
    opt_state, losses = optimizer.init(params), []

    @jax.jit
    def update(grads: Any, opt_state: Any, params: Any) -> Any:
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for batch in batches:
        pieces = [jax.tree.map(lambda x, i=i: np.split(np.asarray(x), parts)[i], batch) for i in range(parts)]
        losses.append(float(np.mean([loss(params, piece) for piece in pieces])))
        grads = jax.tree.map(lambda g, p: jnp.asarray(g, p.dtype), oracle(loss, params, batch, parts), params)
        params, opt_state = update(grads, opt_state, params)
    return params, losses


def line_search_steps(
    loss: Callable[..., Any], params: Any, optimizer: Any, batches: list[Any], parts: int
) -> tuple[Any, list[float]]:
    """As `plain_steps`, with an optimizer that is told the loss: the mean of those of equal parts of each batch."""
    opt_state, losses = optimizer.init(params), []

    @jax.jit
    def step(params: Any, opt_state: Any, pieces: Any) -> Any:
        def value_fn(params: Any) -> Any:
            return sum(loss(params, piece) for piece in pieces) / parts

        value, grad = jax.value_and_grad(value_fn)(params)
        updates, opt_state = optimizer.update(grad, opt_state, params, value=value, grad=grad, value_fn=value_fn)
        return optax.apply_updates(params, updates), opt_state, value

    for batch in batches:
        pieces = [jax.tree.map(lambda x, i=i: np.split(np.asarray(x), parts)[i], batch) for i in range(parts)]
        params, opt_state, value = step(params, opt_state, pieces)
        losses.append(float(value))
    return params, losses


def hook_params() -> dict[str, Any]:
    """Zeros with the shapes of `support.hook_cases`."""
    return {name: jnp.zeros(shape) for name, shape in SHAPES.items()}


def hook_batch(step: int, rows: int) -> dict[str, np.ndarray]:
    """One row of gradients for each replica or microbatch."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *[gradients(step, row) for row in range(rows)])


def linear_loss(params: Any, batch: Any) -> Any:
    """Its gradients are the mean of the batch's rows."""
    return sum(jnp.vdot(params[name], batch[name].mean(0)) for name in params)


def hook_wants(
    hook: SharedHook, size: int, steps: int, parts: int = 1, trainable: Any = None, reduce_dtype: Any = None
) -> dict[str, np.ndarray]:
    """What parameters of zero become by steps of SGD with rate 1 on `hook_batch`, reduced by the hook on the host."""
    ddp = DistributedDataParallel(hook_params(), bucket_cap_mb=BUCKET_BYTES / MIB, trainable=trainable)
    host, params = HostRanks(hook, size), {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(steps):
        batch = hook_batch(step, size * parts)
        means = {name: rows.reshape(size, parts, *rows.shape[1:]).mean(1) for name, rows in batch.items()}
        local = [
            {name: m[rank].astype(reduce_dtype or np.float32) for name, m in means.items()} for rank in range(size)
        ]
        for name, reduced in host.step(layouts_of(ddp.plan, reduce_dtype), local)[0].items():
            params[name] = params[name] - reduced.astype(np.float64)
    return params


def assert_same(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    """Per tensor: the largest difference is at most `tolerance` times the largest value."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        error = np.max(np.abs(a - b), initial=0.0)
        assert error <= tolerance * np.max(np.abs(b), initial=0.0), (jax.tree_util.keystr(path), error)
