"""What each of several processes runs with comm hooks by hand, without train_step."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jax_cases import loss_fn, make_batch, make_params
from processes_pmap import own_rows
from processes_shard_map import mesh, own, place
from step_cases import hook_batch, hook_params
from support.hook_cases import BUCKET_BYTES, HOOKS, STEPS

from unified_ddp.jax import DistributedDataParallel, JaxBucket
from unified_ddp.plan import MIB

MAPPINGS = ("checked", "unchecked", "pmap")
CASES = [
    ("noop", "unchecked"),
    ("allreduce", "pmap"),
    ("fp16", "checked"),
    ("bf16", "unchecked"),
    ("topk", "pmap"),
    ("quantize8", "checked"),
    ("quantize8 late", "unchecked"),
    ("powersgd cold qr", "pmap"),
    *(("topk bf16", mapping) for mapping in MAPPINGS),
    *(("powersgd late", mapping) for mapping in MAPPINGS),
]


def _mapped(mapping: str, one: Callable[..., Any], params: Any) -> tuple[Callable[..., Any], Callable[[Any], Any]]:
    """Returns one(params, ...) mapped over the replicas of all processes, and what makes its arguments of host values.

    The host values have a leading axis of all replicas; of results, each replica keeps its own.
    """
    if mapping == "pmap":
        return jax.pmap(functools.partial(one, params), axis_name="data"), own_rows

    def sharded(*args: Any) -> Any:
        results = one(params, *jax.tree.map(lambda x: x[0], args))
        return jax.tree.map(lambda x: x[None], results)

    check = mapping == "checked"
    shard_mapped = jax.shard_map(sharded, mesh=mesh(), in_specs=P("data"), out_specs=P("data"), check_vma=check)
    return jax.jit(shard_mapped), lambda tree: place(tree, P("data"))


def _own(mapping: str, tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree) if mapping == "pmap" else jax.tree.map(lambda x: x[:, 0], own(tree))


def _shared_hook(name: str, mapping: str) -> list[Any]:
    """This process's gradients in each step. Before the last, state is taken to the host and back."""
    ddp = DistributedDataParallel(hook_params(), bucket_cap_mb=BUCKET_BYTES / MIB, comm_hook=HOOKS[name][0])
    size, params = jax.device_count(), hook_params()

    def loss(params: Any, wanted: Any) -> Any:
        """Linear, so that its gradients are exactly the wanted ones."""
        return sum(jnp.vdot(params[name], wanted[name]) for name in params)

    def one(params: Any, wanted: Any, state: Any) -> Any:
        return ddp.grad(loss, hook_state=state)(params, wanted)

    step, place_own = _mapped(mapping, one, params)
    state, found = place_own(ddp.init_hook_state(size)), []
    for number in range(STEPS):
        if number == STEPS - 1:
            state = place_own(_of_all(_own(mapping, state)))
        grads, state = jax.block_until_ready(step(place_own(hook_batch(number, size)), state))
        found.append(_own(mapping, grads))
    return found


def _of_all(tree: Any) -> Any:
    """This process's values in their places in arrays for all replicas, which hold nothing of the others'."""
    first, size = jax.process_index() * jax.local_device_count(), jax.device_count()

    def one(leaf: np.ndarray) -> np.ndarray:
        full = np.zeros((size, *leaf.shape[1:]), leaf.dtype)
        full[first : first + len(leaf)] = leaf
        return full

    return jax.tree.map(one, tree)


def compressed(bucket: JaxBucket) -> jax.Array:
    half = bucket.storage.astype(jnp.bfloat16) / bucket.axis_size
    return lax.psum(half, bucket.axis_name).astype(bucket.storage.dtype)


def gathered(bucket: JaxBucket) -> jax.Array:
    return lax.all_gather(bucket.storage, bucket.axis_name).sum(0) / bucket.axis_size


def _function(hook: Callable[[JaxBucket], jax.Array], mapping: str) -> Any:
    ddp = DistributedDataParallel(make_params(), bucket_cap_mb=40 / MIB, comm_hook=hook)
    step, place_own = _mapped(mapping, ddp.grad(loss_fn), make_params())
    size = jax.device_count()
    batch = jax.tree.map(lambda x: np.asarray(x).reshape(size, -1, *x.shape[1:]), make_batch())
    return _own(mapping, jax.block_until_ready(step(place_own(batch))))


def results() -> dict[str, Any]:
    return {
        "shared": {case: _shared_hook(*case) for case in CASES},
        "functions": {
            (hook.__name__, mapping): _function(hook, mapping)
            for hook in (compressed, gathered)
            for mapping in MAPPINGS
        },
    }
