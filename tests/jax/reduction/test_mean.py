"""How many all-reduces each strategy lowers to, and that planning happens once."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax_cases import Replicas, loss_fn, make_batch, make_params

from unified_ddp.jax import DistributedDataParallel
from unified_ddp.jax.pytrees import planned as schema_module
from unified_ddp.jax.reduction.mean import LARGE_LEAF_BYTES
from unified_ddp.jax.reduction.packing import PACKED_BYTES, pack, unpack
from unified_ddp.plan import MIB

pytestmark = pytest.mark.timeout(120)


def _all_reduces(ddp: DistributedDataParallel, mapping: str, params: Any, loss: Any, batch: Any) -> int:
    step = Replicas(mapping, 2).shard_mapped(lambda p, b: ddp.value_and_grad(loss)(p, b)[1])
    return step.lower(params, batch).as_text().count("stablehlo.all_reduce")


@pytest.mark.parametrize("mapping", ["checked", "unchecked"])
def test_flat_lowers_to_one_all_reduce_a_bucket(mapping: str) -> None:
    params, batch = make_params(), make_batch()
    for cap in (25, 40 / MIB):
        ddp = DistributedDataParallel(params, bucket_cap_mb=cap, strategy="flat")
        assert _all_reduces(ddp, mapping, params, loss_fn, batch) == len(ddp.plan.buckets)


@pytest.mark.parametrize("mapping", ["checked", "unchecked"])
def test_tuple_lowers_to_one_operand_a_leaf(mapping: str) -> None:
    params, batch = make_params(), make_batch()
    ddp = DistributedDataParallel(params, strategy="tuple")
    assert _all_reduces(ddp, mapping, params, loss_fn, batch) == len(jax.tree.leaves(params))


def test_large_leaf_is_not_copied_into_flat_storage() -> None:
    count = LARGE_LEAF_BYTES // 4
    params = {"large": jnp.ones(count), "small": jnp.ones(2), "small2": jnp.ones(2)}
    ddp = DistributedDataParallel(params, bucket_cap_mb=25, strategy="flat")

    def loss(p: Any, x: Any) -> Any:
        return x.sum() * sum(leaf.sum() for leaf in jax.tree.leaves(p))

    step = Replicas("checked", 2).shard_mapped(lambda p, b: ddp.value_and_grad(loss)(p, b)[1])
    text = step.lower(params, jnp.ones(2)).as_text()
    assert text.count("stablehlo.all_reduce") == 2
    assert f"tensor<{count + 4}xf32>" not in text


@pytest.mark.usefixtures("full_optimisation")
@pytest.mark.parametrize("hook", [None, lambda bucket: jax.lax.pmean(bucket.storage, bucket.axis_name)])
@pytest.mark.parametrize("cap", [25, 7])
def test_what_is_packed_waits_for_what_was_reduced(cap: float, hook: Any) -> None:
    """XLA on CPU would merge the all-reduces, and everything would be packed at once."""
    count = PACKED_BYTES // 4 // 3  # so three of them are packed together
    params = {f"p{i}": jnp.ones(count) for i in range(6)}
    ddp = DistributedDataParallel(params, bucket_cap_mb=cap, strategy="flat", comm_hook=hook)

    def loss(p: Any, x: Any) -> Any:
        return x.sum() * sum((i * leaf).sum() for i, leaf in enumerate(jax.tree.leaves(p)))

    step = Replicas("checked", 2).shard_mapped(lambda p, b: ddp.value_and_grad(loss)(p, b)[1])
    compiled = step.lower(params, batch := jnp.arange(2.0)).compile()
    for i, grad in enumerate(compiled(params, batch).values()):
        assert jnp.array_equal(grad, jnp.full(count, 0.5 * i))
    assert compiled.as_text().count(" all-reduce(") == (1 if hook and cap == 25 else 2)


@pytest.mark.usefixtures("full_optimisation")
def test_unpacked_gradients_of_one_size_share_a_kernel() -> None:
    """XLA on CPU compiles a kernel for every different constant: offsets must not be constants to it."""
    params = {f"p{i}": jnp.ones((3, 5)) for i in range(20)}
    ddp = DistributedDataParallel(params, strategy="flat")

    def loss(p: Any, x: Any) -> Any:
        return x.sum() * sum((leaf**2).sum() for leaf in jax.tree.leaves(p))

    step = Replicas("checked", 2).shard_mapped(lambda p, b: ddp.value_and_grad(loss)(p, b)[1])
    text = step.lower(params, jnp.ones(2)).compile().as_text()
    kernels = [line for line in text.splitlines() if " dynamic-slice(" in line]
    assert len(kernels) == 20
    assert len({line.split("dynamic-slice(")[1].split(")")[1] for line in kernels}) == 1
    assert text.count(" slice(") <= 1  # the element that decides the conditional


@pytest.mark.parametrize("shapes", [[(2, 3), (6,), ()], [(0,), (0, 2)], [(), (0,), ()], [(4,), (2,)]])
def test_packing_and_unpacking(shapes: list[tuple[int, ...]]) -> None:
    arrays = [jnp.full(shape, i, jnp.float32) for i, shape in enumerate(shapes)]
    for taken in (unpack, jax.jit(unpack)):
        for piece, array in zip(taken(pack(arrays), arrays), arrays, strict=True):
            assert piece.shape == array.shape
            assert jnp.array_equal(piece, array)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
@pytest.mark.parametrize("value", [jnp.inf, jnp.nan, 1.0])
def test_packing_after_what_is_not_finite(dtype: str, value: float) -> None:
    arrays = [jnp.arange(3, dtype=dtype), jnp.zeros((0,), dtype), jnp.ones((1, 2), dtype)]
    for packed in (pack, jax.jit(pack)):
        assert packed(arrays, jnp.array([value, 5], dtype)).tolist() == [0, 1, 2, 1, 1]


def test_unpacking_what_is_not_finite() -> None:
    for value in (jnp.inf, -jnp.inf, jnp.nan):
        pieces = unpack(jnp.array([value, 1.0, 2.0, 3.0]), [jnp.zeros(2), jnp.zeros(2)])
        assert pieces[0][1] == 1.0
        assert pieces[1].tolist() == [2.0, 3.0]


def test_default_strategy_within_one_process() -> None:
    assert DistributedDataParallel(make_params()).strategy == "tuple"
    assert DistributedDataParallel(make_params(), strategy="flat").strategy == "flat"


def test_default_strategy_across_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert DistributedDataParallel(make_params()).strategy == "flat"


def test_planned_once_however_often_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []
    plan = schema_module.plan_in_ready_order
    monkeypatch.setattr(schema_module, "plan_in_ready_order", lambda *args: planned.append(args) or plan(*args))
    schema_module.plan_of.cache_clear()
    params, batch = make_params(), make_batch()

    def step(params: Any, batch: Any) -> Any:
        ddp = DistributedDataParallel(params, bucket_cap_mb=3)  # inside the traced function: once a trace
        return ddp.value_and_grad(loss_fn)(params, batch)[1]

    for _ in range(3):
        Replicas("checked", 2).shard_mapped(lambda p, b: step(p, b)).lower(params, batch)
    assert len(planned) == 1
