"""Hooks without memory, on the host."""

from typing import Any

import numpy as np
import pytest
from support.hook_buckets import LAYOUT, buffers
from support.host_ranks import reduce_on_host

from unified_ddp.hooks import AllReduce, Compressed, Noop


def test_noop_leaves_gradients_local() -> None:
    reduced, states = reduce_on_host(Noop(), LAYOUT, [{}] * 3, buffers(0))
    assert all(np.array_equal(result, own) for result, own in zip(reduced, buffers(0), strict=True))
    assert states == [{}] * 3


def test_all_reduce_is_the_mean() -> None:
    reduced, _ = reduce_on_host(AllReduce(), LAYOUT, [{}] * 3, buffers(0))
    np.testing.assert_allclose(reduced, [np.mean(buffers(0), axis=0)] * 3, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("dtype", "bound"), [("float16", 2e-3), ("bfloat16", 2e-2)])
def test_what_is_sent_is_narrow_and_what_comes_is_not(dtype: Any, bound: float) -> None:
    reduced, _ = reduce_on_host(Compressed(AllReduce(), dtype), LAYOUT, [{}] * 3, buffers(0))
    mean = np.mean(buffers(0), axis=0)
    assert reduced[0].dtype == np.float64
    assert 0 < np.abs(reduced[0] - mean).max() <= bound * np.abs(mean).max()


def test_a_wrong_dtype_is_named() -> None:
    with pytest.raises(ValueError, match="Compressed takes the dtype 'float16' or 'bfloat16', not 'int8'"):
        Compressed(AllReduce(), "int8")  # type: ignore[arg-type]
