"""Normal numbers that every framework draws alike: Threefry-2x32 with 20 rounds (Salmon et al., SC 2011)."""

import hashlib
import math
from collections.abc import Sequence

import numpy as np

from unified_ddp.hooks.collectives import Array
from unified_ddp.hooks.ops import Ops

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_MASK = 0xFFFFFFFF


def normal(ops: Ops, seed: int, names: Sequence[str], step: Array, count: int) -> Array:
    """Returns float32 normal numbers, shape (len(names), count), that depend on seed, name, step and place alone.

    The integers drawn are the same everywhere; the numbers differ by the rounding of log, sqrt and cos.

    Args:
        ops: operations on the arrays returned.
        seed: any integer.
        names: the key of each row.
        step: a number of 32 bits, as an array of the framework.
        count: numbers a row.
    """
    digests = [hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest() for name in names]
    keys = np.frombuffer(b"".join(digests), "<u4").astype(np.uint32).reshape(len(names), 2)
    place = ops.from_numpy(np.arange(count, dtype=np.uint32)[None] + np.zeros((len(names), 1), np.uint32))
    words = _threefry(ops, keys, place, place * 0 + ops.cast(step, "uint32"))
    # 24 bits, what a float32 holds; from the middles of intervals, as the logarithm of 0 is none
    first, second = (
        ops.cast(word >> ops.from_numpy(np.array(8, np.uint32)), "float32") * 2.0**-24 + 2.0**-25 for word in words
    )
    return ops.sqrt(ops.log(first) * -2.0) * ops.cos(second * (2 * math.pi))


def _threefry(ops: Ops, keys: np.ndarray, x0: Array, x1: Array) -> tuple[Array, Array]:
    def word(value: int | np.ndarray) -> Array:
        return ops.from_numpy(np.asarray(value, np.uint32))

    mask = word(_MASK)  # where words are held in wider integers
    schedule = [keys[:, :1], keys[:, 1:], keys[:, :1] ^ keys[:, 1:] ^ np.uint32(_PARITY)]
    x0, x1 = (x0 + word(schedule[0])) & mask, (x1 + word(schedule[1])) & mask
    for block in range(5):
        for rotation in _ROTATIONS[block % 2]:
            x0 = (x0 + x1) & mask
            x1 = ((x1 << word(rotation)) & mask) | (x1 >> word(32 - rotation))
            x1 = x1 ^ x0
        x0 = (x0 + word(schedule[(block + 1) % 3])) & mask
        x1 = (x1 + word(schedule[(block + 2) % 3]) + word(block + 1)) & mask
    return x0, x1
