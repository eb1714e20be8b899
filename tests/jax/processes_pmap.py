"""What each of several processes runs in pmap, which maps its own devices; the axis spans those of all."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_cases import loss_fn, make_batch, make_params

from unified_ddp.errors import UnifiedDDPError
from unified_ddp.jax import DistributedDataParallel, all_reduce_gradients
from unified_ddp.plan import MIB


def own_rows(tree: Any) -> Any:
    """This process's part of a pytree with rows for all."""
    return jax.tree.map(lambda x: np.split(np.asarray(x), jax.process_count())[jax.process_index()], tree)


def _batch() -> Any:
    """This process's rows, with a leading axis of its devices."""
    return jax.tree.map(lambda x: np.stack(np.split(x, jax.local_device_count())), own_rows(make_batch()))


def numbered_by_replica() -> dict[str, Any]:
    """Values of many types, another on each replica; with a leading axis of this process's devices."""
    replicas = own_rows(np.arange(jax.device_count()))
    named = {dtype: replicas.astype(dtype) for dtype in ("float32", "float16", "complex64", "int8", "int32")}
    odd = {"bfloat16": jnp.asarray(replicas, jnp.bfloat16), "bool": replicas % 2 == 1}
    return named | odd | {"nan": np.where(replicas == 2, np.nan, -0.0), "key": jax.vmap(jax.random.key)(replicas)}


def _run(step: Callable[..., Any], *args: Any, **options: Any) -> Any:
    result = jax.block_until_ready(jax.pmap(step, axis_name="data", **options)(*args))
    return jax.tree.map(np.asarray, result)


def _with_params(step: Callable[[Any, Any], Any]) -> Any:
    return _run(step, make_params(), _batch(), in_axes=(None, 0))


def _gradients(strategy: Any) -> Any:
    ddp = DistributedDataParallel(make_params(), bucket_cap_mb=40 / MIB, strategy=strategy)
    return _with_params(ddp.value_and_grad(loss_fn))


def _accumulated() -> Any:
    """One reduction of the gradients of a batch taken twice."""
    ddp = DistributedDataParallel(make_params())

    def step(params: Any, batch: Any) -> Any:
        grads = ddp.zero_gradients(params)
        for _ in range(2):
            grads = jax.tree.map(jnp.add, grads, ddp.grad(loss_fn, sync=False)(params, batch))
        return ddp.all_reduce(grads)

    return _with_params(step)


def _optax() -> Any:
    optimizer = optax.chain(all_reduce_gradients("data"), optax.scale(-2.0))

    def step(params: Any, batch: Any) -> Any:
        return optimizer.update(jax.grad(loss_fn)(params, batch), optimizer.init(params), params)[0]

    return _with_params(step)


def _numbered(call: Callable[[DistributedDataParallel, Any], Any], strategy: Any = None) -> Any:
    ddp = DistributedDataParallel(make_params(), strategy=strategy)

    def step(tree: Any) -> Any:
        result = call(ddp, tree)
        return result | ({"key": jax.random.key_data(result["key"])} if "key" in result else {})

    return _run(step, numbered_by_replica())


def _mean(ddp: DistributedDataParallel, tree: Any) -> Any:
    return ddp.mean({name: leaf for name, leaf in tree.items() if name not in ("key", "nan")})


def _errors() -> dict[str, str]:
    """What is raised without an axis name, with another one, and outside of pmap."""
    params, batch = make_params(), _batch()
    step = DistributedDataParallel(params).value_and_grad(loss_fn)
    calls = {
        "unnamed": lambda: jax.pmap(step, in_axes=(None, 0))(params, batch),
        "other": lambda: jax.pmap(step, axis_name="batch", in_axes=(None, 0))(params, batch),
        "outside": lambda: step(params, batch),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = "no error"
        except UnifiedDDPError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def results() -> dict[str, Any]:
    strategies = ("flat", "tuple")
    return {
        "gradients": {s: _gradients(s) for s in strategies},
        "accumulated": _accumulated(),
        "optax": _optax(),
        "mean": _numbered(_mean),
        "broadcast_from": {s: _numbered(lambda ddp, tree: ddp.broadcast_from(tree, 2), s) for s in strategies},
        "sync_buffers": _numbered(lambda ddp, tree: ddp.sync_buffers(tree)),
        "errors": _errors(),
    }
