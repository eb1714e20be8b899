"""Packing into flat arrays and back: values, what waits for what, and how much there is to compile."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax_cases import Replicas

from unified_ddp.jax import DistributedDataParallel
from unified_ddp.jax.reduction.packing import PACKED_BYTES, pack, unpack

pytestmark = pytest.mark.timeout(120)


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
