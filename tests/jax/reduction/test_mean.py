"""How many all-reduces each strategy lowers to, and that planning happens once."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from jax_cases import Replicas, assert_all_close, loss_fn, make_batch, make_params, mesh, oracle

from unified_ddp.jax import DistributedDataParallel
from unified_ddp.jax.reduction.mean import LARGE_LEAF_BYTES
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


def test_default_strategy_within_one_process() -> None:
    assert DistributedDataParallel(make_params()).strategy == "tuple"
    assert DistributedDataParallel(make_params(), strategy="flat").strategy == "flat"


def test_default_strategy_across_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert DistributedDataParallel(make_params()).strategy == "flat"


@pytest.mark.parametrize(("mapping", "strategy"), [("checked", "flat"), ("vmap", "tuple")])
def test_large_leaves_beside_small_ones(mapping: str, strategy: Any) -> None:
    params = {"small": jnp.ones(3), "large": jnp.ones((512, 512)), "small2": jnp.ones((2, 2)), "zlarge": jnp.ones(MIB)}
    batch = jnp.arange(4.0)
    ddp = DistributedDataParallel(params, bucket_cap_mb=100, strategy=strategy)
    assert len(ddp.plan.buckets) == 1

    def loss(p: Any, x: Any) -> Any:
        return x.sum() * sum((i + 1) * leaf.sum() for i, leaf in enumerate(jax.tree.leaves(p)))

    grads = Replicas(mapping, 2)(lambda p, x: ddp.value_and_grad(loss)(p, x)[1], params, batch)
    assert_all_close(grads, oracle(loss, params, batch, 2))


@pytest.mark.parametrize("strategy", ["flat", "tuple"])
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("columns", [4, 2**20])
def test_params_of_which_some_are_split_over_the_model_axis(columns: int, check_vma: bool, strategy: Any) -> None:
    """Replicated ones stay replicated by type, whatever they are packed with, or after (more than 8 MiB are packed)."""
    split = {f"s{i}": jnp.full((2, columns), i + 1.0) for i in range(4)}
    whole = {f"w{i}": jnp.full(columns // 2, i + 1.0) for i in range(4)}
    specs = dict.fromkeys(split, P("model")) | dict.fromkeys(whole, P())
    local = {name: x[:1] for name, x in split.items()} | whole
    ddp = DistributedDataParallel(local, strategy=strategy)

    def loss(params: Any, x: Any) -> Any:
        split_sum = sum((params[name] ** 2).sum() for name in split)
        return x.mean() * (lax.psum(split_sum, "model") if check_vma else split_sum) + x.mean() * sum(
            (params[name] ** 2).sum() for name in whole
        )

    mapped = jax.shard_map(
        lambda p, x: ddp.grad(loss)(p, x),
        mesh=mesh(2, "data", 2, "model"),
        in_specs=(specs, P("data")),
        out_specs=specs,
        check_vma=check_vma,
    )
    grads = jax.jit(mapped)(split | whole, jnp.array([1.0, 2.0]))
    for name, param in (split | whole).items():
        assert jnp.array_equal(grads[name], 3 * param), name
