"""Top-k against its algorithm, written plainly."""

import numpy as np
import pytest
from support.hook_buckets import LAYOUT, buffers, start
from support.host_ranks import reduce_on_host

from unified_ddp.hooks import TopK


def test_top_k_sends_the_largest() -> None:
    local = buffers(0)
    local[0][:3] = local[0][3:6] = 9.0  # of equal ones the first
    sent = []
    for buffer in local:
        largest = sorted(range(len(buffer)), key=lambda i: (-abs(buffer[i]), i))[:4]
        sent.append(np.where(np.isin(np.arange(len(buffer)), largest), buffer, 0))
    reduced, states = reduce_on_host(TopK(ratio=4 / LAYOUT.numel), LAYOUT, start(TopK()), local)
    for result, state, buffer, own in zip(reduced, states, local, sent, strict=True):
        assert np.allclose(result, np.mean(sent, axis=0), rtol=1e-15)
        assert np.array_equal(state["error"], buffer - own)


@pytest.mark.parametrize("ratio", [0, -0.1, 1.5])
def test_a_wrong_ratio_is_named(ratio: float) -> None:
    with pytest.raises(ValueError, match=f"TopK takes a ratio above 0 and at most 1, not {ratio}"):
        TopK(ratio=ratio)
