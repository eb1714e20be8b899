"""Normal numbers from the published Threefry."""

import numpy as np

from unified_ddp.hooks.ops import Ops
from unified_ddp.hooks.random import _threefry, normal


def test_normal_numbers() -> None:
    numbers = normal(Ops(), 0, ["a", "b"], np.zeros((), np.uint32), 50_000)
    assert np.allclose(
        [numbers.mean(), numbers.std(), (numbers**3).mean(), (numbers**4).mean()], [0, 1, 0, 3], atol=0.05
    )
    assert abs(np.corrcoef(numbers)[0, 1]) < 0.02
    assert np.array_equal(numbers[1:], normal(Ops(), 0, ["b"], np.zeros((), np.uint32), 50_000))
    for seed, step in ((1, 0), (0, 1)):
        other = normal(Ops(), seed, ["a"], np.full((), step, np.uint32), 50_000)
        assert abs(np.corrcoef(numbers[0], other[0])[0, 1]) < 0.02


def test_threefry_is_the_published_one() -> None:
    """Random123's known answers for threefry2x32 with 20 rounds."""

    def run(key: tuple[int, int], counter: tuple[int, int]) -> tuple[int, ...]:
        x0, x1 = (np.full((1, 1), value, np.uint32) for value in counter)
        return tuple(int(x.item()) for x in _threefry(Ops(), np.array([key], np.uint32), x0, x1))

    assert run((0, 0), (0, 0)) == (0x6B200159, 0x99BA4EFE)
    assert run((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF)) == (0x1CB996FC, 0xBB002BE7)
    assert run((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3)) == (0xC4923A9C, 0x483DF7A0)
