"""8-bit quantisation against its algorithm, written plainly."""

import numpy as np
import pytest
from support.hook_buckets import LAYOUT, buffers, start
from support.host_ranks import reduce_on_host

from unified_ddp.hooks import Quantize8


def test_quantisation_rounds_to_127_steps_of_a_block() -> None:
    hook, local = Quantize8(block=100), buffers(0)
    sent = []
    for buffer in local:
        parts = [buffer[i : i + 100] for i in range(0, len(buffer), 100)]
        scales = [np.abs(part).max() / 127 for part in parts]
        sent.append(np.concatenate([np.rint(p / s) * s for p, s in zip(parts, scales, strict=True)]))
    reduced, _ = reduce_on_host(hook, LAYOUT, start(hook), local)
    assert np.abs(reduced[0] - np.mean(sent, axis=0)).max() < 1e-14
    assert all(
        np.abs(own - buffer).max() <= np.abs(buffer).max() / 254 for own, buffer in zip(sent, local, strict=True)
    )


def test_a_wrong_block_is_named() -> None:
    with pytest.raises(ValueError, match="Quantize8 takes a block of 1 or more elements, not 0"):
        Quantize8(block=0)
