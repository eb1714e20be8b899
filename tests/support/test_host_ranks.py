from typing import Any

import pytest

from support.hook_buckets import LAYOUT, buffers
from support.host_ranks import reduce_on_host
from unified_ddp.hooks import SharedHook, Sum


def test_hooks_that_ask_for_different_collectives_are_named() -> None:
    class Uneven(SharedHook):
        def __call__(self, state: Any, bucket: Any, /) -> Any:
            total = yield Sum(bucket.storage[: state["count"]])
            return total, state

    with pytest.raises(RuntimeError, match="different collectives"):
        reduce_on_host(Uneven(), LAYOUT, [{"count": 1}, {"count": 2}], buffers(0, 2))
