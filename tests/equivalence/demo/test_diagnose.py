"""Which known fault explains wrong gradients."""

import numpy as np
import pytest

from unified_ddp.equivalence.demo.diagnose import StepEvidence, explain

NAMES = ("a", "b", "c")


def local(step, rank):
    rng = np.random.default_rng([step, rank])
    return {name: rng.standard_normal(4).astype(np.float32) for name in NAMES}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_contributed_nothing_or_the_past_is_named(size, rank):
    now, past = [local(1, r) for r in range(size)], [local(0, r) for r in range(size)]
    for replacement, words in ((past[rank], "the step before"), ({n: 0 * v for n, v in past[0].items()}, "nothing")):
        given = [replacement if r == rank else now[r] for r in range(size)]
        reduced = {name: np.mean([g[name] for g in given], axis=0) for name in NAMES}
        reason = explain(StepEvidence([reduced] * size, now, past), NAMES, 1e-5)
        assert f"rank {rank} contributed" in reason
        assert words in reason
