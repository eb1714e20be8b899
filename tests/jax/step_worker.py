"""One of several processes that train together, started by torchrun. Arguments: folder for results, cases."""

import dataclasses
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

from unified_ddp.errors import UnifiedDDPError
from unified_ddp.hooks import TopK
from unified_ddp.jax import DistributedDataParallel, initialize, pad_batch
from unified_ddp.jax.step.processes import ProcessGathering
from unified_ddp.plan import MIB

initialize(initialization_timeout=60)

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]
from jax_cases import loss_fn, make_params  # noqa: E402
from step_cases import batches, hook_batch, hook_params, linear_loss  # noqa: E402
from support.hook_cases import BUCKET_BYTES, HOOKS  # noqa: E402

folder, rank, size = Path(sys.argv[1]), jax.process_index(), jax.process_count()


def own_rows(batch: Any) -> Any:
    return jax.tree.map(lambda x: np.split(np.array(x), size)[rank], batch)


def make_step(**options: Any) -> Any:
    return DistributedDataParallel(make_params()).train_step(loss_fn, optax.adamw(0.01), **options)


def saved_and_restored(leaf: Any) -> Any:
    return leaf if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else np.array(leaf)


def named(params: Any) -> dict[str, Any]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf).tolist()
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if leaf.dtype == jnp.float32
    }


def trains() -> dict[str, Any]:
    """From process 0's params; the other's are others. Between steps the state is what a checkpoint would give."""
    params = make_params() | {"key": jax.random.key(rank), "n": jnp.int32(rank)}
    step = DistributedDataParallel(params).train_step(loss_fn, optax.adamw(0.01), accumulate=2)
    state = step.init(jax.tree.map(lambda p: p * (rank + 1) if p.dtype == jnp.float32 else p, params))
    losses = []
    for batch in batches(3, 16):
        state, loss = step(state, own_rows(batch))
        losses.append(float(loss))
        state = jax.tree.map(saved_and_restored, state)
    key = jax.random.key_data(state.params["key"]).tolist()
    return {"params": named(state.params), "losses": losses, "key": key, "n": int(state.params["n"])}


def line_search() -> dict[str, Any]:
    """What differs between processes, here one more leaf, is found before the search begins."""
    step = DistributedDataParallel(make_params()).train_step(loss_fn, optax.lbfgs())
    state, losses = step.init(make_params()), []
    for batch in batches(3, 16):
        state, loss = step(state, own_rows(batch))
        losses.append(float(loss))
    error = _error(lambda: step(state, own_rows(batch) | ({"more": np.ones(8)} if rank else {})))
    return {"params": named(state.params), "losses": losses, "error": error}


def hooks() -> dict[str, Any]:
    found = {}
    for name in ("powersgd", "topk"):
        ddp = DistributedDataParallel(hook_params(), comm_hook=HOOKS[name][0], bucket_cap_mb=BUCKET_BYTES / MIB)
        step = ddp.train_step(linear_loss, optax.sgd(1.0))
        state = step.init(hook_params())
        for number in range(3):
            state, _ = step(state, own_rows(hook_batch(number, jax.device_count())))
        found[name] = {leaf: np.asarray(value).tolist() for leaf, value in state.params.items()}
    return found


def keys_and_weights() -> dict[str, Any]:
    """Process 1 has no data left: its weights are 0."""

    def loss(params: Any, batch: Any, rng: Any) -> Any:
        each = jnp.full(len(batch["x"]), jax.random.normal(rng, ()))
        return each + 0 * loss_fn(params, batch), batch["x"][:, 0]

    step = DistributedDataParallel(make_params()).train_step(loss, optax.sgd(0.1), has_aux=True)
    batch, weight = pad_batch(jax.tree.map(lambda x: x[: 3 * (rank == 0)], own_rows(batches(1, 8)[0])), 4)
    _, (loss, aux) = step(step.init(make_params()), batch, jax.random.key(5), weight)
    return {"loss": float(loss), "aux": float(aux)}


def _error(call: Any) -> str:
    try:
        call()
    except UnifiedDDPError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def mismatches() -> dict[str, str]:
    params = make_params()
    other = make_params() | ({"more": jnp.ones(2)} if rank else {})
    shape = make_params() | {"scale": jnp.ones(1 + rank)}
    ddp = DistributedDataParallel
    return {
        "parameters": _error(lambda: ddp(other).train_step(loss_fn, optax.sgd(0.1)).init(other)),
        "shape": _error(lambda: ddp(shape).train_step(loss_fn, optax.sgd(0.1)).init(shape)),
        "options": _error(lambda: make_step(accumulate=1 + rank).init(params)),
        "buckets": _error(
            lambda: ddp(params, bucket_cap_mb=(1 + 9 * rank) * 1e-5).train_step(loss_fn, optax.sgd(0.1)).init(params)
        ),
        "trainable": _error(
            lambda: (
                ddp(params, trainable=lambda n: n != "scale" or rank == 0)
                .train_step(loss_fn, optax.sgd(0.1))
                .init(params)
            )
        ),
        "comm_hook": _error(
            lambda: ddp(params, comm_hook=TopK(ratio=0.1 + 0.1 * rank)).train_step(loss_fn, optax.sgd(0.1)).init(params)
        ),
        "optimizer": _error(
            lambda: ddp(params).train_step(loss_fn, optax.sgd(0.1) if rank else optax.adam(0.1)).init(params)
        ),
        "buffers": _error(lambda: make_step().init(params, {"mean": jnp.ones(2)} if rank else None)),
    }


def uneven() -> dict[str, Any]:
    step, params = make_step(), make_params()
    state, batch = step.init(params), own_rows(batches(1, 16)[0])
    error = _error(lambda: step(state, jax.tree.map(lambda x: x[: 4 + 4 * rank], batch)))
    _, loss = step(state, batch)
    return {"error": error, "loss after it": float(loss)}


def different() -> dict[str, Any]:
    """Process 1 calls a step in another way, on batches of the same shapes, or from another state."""

    def loss(params: Any, batch: Any, rng: Any = None, train: bool = True) -> Any:
        return loss_fn(params, batch)

    def each_loss(params: Any, batch: Any) -> Any:
        return loss_fn(params, batch) * jnp.ones(len(batch["x"])) if rank else loss_fn(params, batch)

    def make(loss: Any) -> Any:
        return DistributedDataParallel(make_params()).train_step(loss, optax.adamw(0.01))

    step, weighed, batch = make(loss), make(each_loss), own_rows(batches(1, 16)[0])
    state = step.init(make_params())
    restored = jax.tree.map(np.array, state)
    other = dataclasses.replace(restored, params=jax.tree.map(lambda p: p * (1 + rank), restored.params))
    whole = batch | {"y": batch["y"].astype(np.int32)} if rank else batch
    ones = np.ones(len(batch["x"]), np.float32)
    return {
        "weight": _error(lambda: weighed(state, batch, weight=ones if rank else None)),
        "rng": _error(lambda: step(state, batch, jax.random.key(0) if rank else None)),
        "static": _error(lambda: step(state, batch, train=rank == 0)),
        "dtype": _error(lambda: step(state, whole)),
        "step": _error(lambda: step(dataclasses.replace(restored, step=np.int32(5 * rank)), batch)),
        "params": _error(lambda: step(other, batch)),
        "loss after them": float(step(state, batch)[1]),
    }


def without_store() -> dict[str, Any]:
    """As where JAX hides its key-value store: texts are gathered by collectives."""
    with mock.patch.dict(sys.modules, {"jax._src.distributed": None}):
        texts = ProcessGathering("the test", None).all_gather_text("\u00e9" * (rank + 1))
        return {"texts": texts, "error": _error(lambda: make_step(accumulate=1 + rank).init(make_params()))}


def not_finite() -> dict[str, Any]:
    step, params = make_step(on_nonfinite="raise"), make_params()
    batch = own_rows(batches(1, 16)[0])
    if rank == 1:
        batch["y"][-1] = np.inf
    return {"error": _error(lambda: step(step.init(params), batch))}


def stalls() -> dict[str, Any]:
    """Process 1 comes to one init less, and to one step less."""
    step, params = make_step(timeout=4), make_params()
    state, batch = step.init(params), own_rows(batches(1, 16)[0])
    state, _ = step(state, batch)
    if rank == 1:
        return {}
    return {"init": _error(lambda: make_step(timeout=2).init(params)), "step": _error(lambda: step(state, batch))}


try:
    for name in sys.argv[2:]:
        partial = folder / f"{name}.{rank}"
        partial.write_text(json.dumps(globals()[name]()))
        partial.rename(folder / f"{name}.{rank}.json")
except BaseException:
    traceback.print_exc()
    os._exit(1)  # an ordinary exit would wait for the others
if "stalls" in sys.argv:
    # Process 0 is still in a collective that will not end: neither waits for it at exit, nor leaves before the other.
    while not all((folder / f"stalls.{r}.json").exists() for r in range(size)):
        time.sleep(0.05)
    os._exit(0)
