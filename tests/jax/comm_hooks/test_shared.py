"""Hooks of unified_ddp.hooks in JAX: the numbers that the same hook gives on the host, however replicas are mapped."""

import copy
import functools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax_cases import Replicas, mesh
from support.hook_cases import BUCKET_BYTES, HOOKS, SHAPES, STEPS, HostRanks, assert_close, gradients

from unified_ddp.errors import MisuseError
from unified_ddp.hooks import AllReduce, Noop, PowerSGD, TopK
from unified_ddp.jax import DistributedDataParallel
from unified_ddp.jax.comm_hooks.shared import layouts_of
from unified_ddp.plan import MIB

pytestmark = pytest.mark.timeout(200)


def make_ddp(hook: Any, **options: Any) -> DistributedDataParallel:
    params = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in SHAPES.items()}
    return DistributedDataParallel(params, bucket_cap_mb=BUCKET_BYTES / MIB, comm_hook=hook, **options)


def loss_fn(params: Any, wanted: Any) -> Any:
    """Linear, so that its gradients are exactly the wanted ones."""
    return sum(jnp.vdot(params[name], wanted[name]) for name in params)


def step_fn(ddp: DistributedDataParallel, replicas: Replicas) -> Any:
    """Returns step(params, wanted, state) -> (grads, state), all with a leading axis of replicas save params."""

    def one(params: Any, wanted: Any, state: Any) -> Any:
        _, grads, state = ddp.value_and_grad(loss_fn, hook_state=state)(params, wanted)
        return grads, state

    if replicas.mapping == "vmap":
        return jax.jit(jax.vmap(one, axis_name="data", in_axes=(None, 0, 0)))
    if replicas.mapping == "pmap":
        mapped = jax.pmap(one, axis_name="data", devices=jax.devices("cpu")[: replicas.size])
        stacked = functools.partial(jax.tree.map, lambda x: jnp.stack([x] * replicas.size))
        return lambda params, wanted, state: mapped(stacked(params), wanted, state)

    def sharded(params: Any, wanted: Any, state: Any) -> Any:
        grads, state = one(params, jax.tree.map(lambda x: x[0], wanted), state)
        return jax.tree.map(lambda x: x[None], grads), state

    return jax.jit(
        jax.shard_map(
            sharded,
            mesh=mesh(replicas.size, "data"),
            in_specs=(P(), P("data"), P("data")),
            out_specs=P("data"),
            check_vma=replicas.mapping == "checked",
        )
    )


EVERYWHERE = ("topk bf16", "quantize8 late", "powersgd late")
CASES = [
    *((name, *how) for name in HOOKS for how in (("vmap", 2),)),
    *((name, *how) for name in ("fp16", "bf16", "powersgd cold qr") for how in (("checked", 2),)),
    *((name, *how) for name in EVERYWHERE for how in (("checked", 4), ("unchecked", 4))),
    ("topk bf16", "pmap", 2),
]


@pytest.mark.parametrize(("name", "mapping", "size"), CASES)
def test_same_numbers_as_on_the_host(name: str, mapping: str, size: int) -> None:
    hook, *tolerances = HOOKS[name]
    ddp = make_ddp(hook)
    layouts = layouts_of(ddp.plan)
    assert len(layouts) > 1
    step, host, state = step_fn(ddp, Replicas(mapping, size)), HostRanks(hook, size), ddp.init_hook_state(size)
    params = {n: jnp.zeros(shape) for n, shape in SHAPES.items()}
    for i in range(STEPS):
        local = [gradients(i, rank) for rank in range(size)]
        wanted = jax.tree.map(lambda *leaves: np.stack(leaves), *local)
        grads, state = jax.block_until_ready(step(params, wanted, state))
        for rank, want in enumerate(host.step(layouts, local)):
            assert_close(jax.tree.map(lambda g, rank=rank: g[rank], grads), want, tolerances[size > 2])


@pytest.mark.parametrize("name", ["allreduce", *EVERYWHERE])
def test_results_are_replicated_by_type(name: str) -> None:
    """Types say so to out_specs=P(), though state is each replica's own."""
    ddp = make_ddp(HOOKS[name][0])

    def step(params: Any, wanted: Any, state: Any) -> Any:
        _, grads, state = ddp.value_and_grad(loss_fn, hook_state=state)(params, wanted)
        return grads, state

    specs = (P(), P(), P("data"))
    mapped = jax.shard_map(step, mesh=mesh(2, "data"), in_specs=specs, out_specs=(P(), P("data")), check_vma=True)
    params = {n: jnp.zeros(shape) for n, shape in SHAPES.items()}
    grads, state = jax.eval_shape(mapped, params, params, ddp.init_hook_state(2))
    assert jax.tree.map(jnp.shape, grads) == SHAPES
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(np.shape, ddp.init_hook_state(2))


def test_accumulated_gradients_are_reduced_once_with_state() -> None:
    ddp = make_ddp(TopK(ratio=0.1))

    def step(params: Any, wanted: Any, state: Any) -> Any:
        grads = ddp.zero_gradients(params)
        for _ in range(2):
            grads = jax.tree.map(jnp.add, grads, ddp.value_and_grad(loss_fn, sync=False)(params, wanted)[1])
        return ddp.all_reduce(grads, hook_state=state)

    local = [gradients(0, rank) for rank in range(2)]
    params = {n: jnp.zeros(shape) for n, shape in SHAPES.items()}
    wanted = jax.tree.map(lambda *leaves: np.stack(leaves), *local)
    mapped = jax.jit(jax.vmap(step, axis_name="data", in_axes=(None, 0, 0)))
    grads, _ = mapped(params, wanted, ddp.init_hook_state(2))
    twice = [{name: 2 * grad for name, grad in grads.items()} for grads in local]
    want = HostRanks(TopK(ratio=0.1), 2).step(layouts_of(ddp.plan), twice)
    assert_close(jax.tree.map(lambda g: g[1], grads), want[1], 1e-6)


def test_state_survives_copy_and_pickle() -> None:
    """And it is a pytree of arrays: a step goes on from the copy as from the original."""
    ddp = make_ddp(PowerSGD(rank=2, start_step=1))
    step = step_fn(ddp, Replicas("vmap", 2))
    params = {n: jnp.zeros(shape) for n, shape in SHAPES.items()}
    wanted = jax.tree.map(lambda *leaves: np.stack(leaves), *[gradients(0, rank) for rank in range(2)])
    state = ddp.init_hook_state(2)
    for _ in range(2):
        _, state = step(params, wanted, state)
    want = step(params, wanted, state)
    for copied in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert jax.tree.all(jax.tree.map(jnp.array_equal, step(params, wanted, copied), want))


def test_a_hook_without_state_needs_none() -> None:
    ddp = make_ddp(AllReduce())
    assert jax.tree.leaves(ddp.init_hook_state(2)) == []
    params = {n: jnp.zeros(shape) for n, shape in SHAPES.items()}
    grads = Replicas("checked", 2)(lambda p, b: ddp.value_and_grad(loss_fn)(p, p)[1], params, jnp.zeros(2))
    assert jax.tree.map(lambda g: g.shape[1:], grads) == SHAPES


@pytest.mark.parametrize(("other", "text"), [(None, "init_hook_state"), (Noop(), "does not fit"), (PowerSGD(), "fit")])
def test_missing_or_wrong_state_is_named(other: Any, text: str) -> None:
    ddp = make_ddp(TopK(start_step=1))
    given = other and make_ddp(other).init_hook_state(1)
    params = {n: jnp.zeros(shape) for n, shape in SHAPES.items()}
    with pytest.raises(MisuseError, match=text):
        Replicas("vmap", 2)(lambda p, b: ddp.value_and_grad(loss_fn, hook_state=given)(p, p), params, jnp.zeros(2))


def test_complex_parameters_are_refused_by_name() -> None:
    params = {"phase": jax.ShapeDtypeStruct((3,), np.complex64)}
    with pytest.raises(MisuseError, match=r"PowerSGD .* bucket 0 \(phase, ...\) holds complex64"):
        DistributedDataParallel(params, comm_hook=PowerSGD())
    DistributedDataParallel(params, comm_hook=AllReduce())
