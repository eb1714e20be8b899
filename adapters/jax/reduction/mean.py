"""The mean of a bucket's gradients: which are packed, and which are operands of one all-reduce as they are.

Measured on CPU: every operand of an all-reduce costs a round trip, of about 0.5 ms between processes and 0.1 ms in one,
so small gradients are packed; but that takes up to 0.2 times longer to compile, and in one process it is left to users.
"""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from unified_ddp.jax.reduction.axes import replica_count
from unified_ddp.jax.reduction.packing import PACKED_BYTES, Turns, alike, unpack
from unified_ddp.plan import MIB

Strategy = Literal["flat", "tuple"]

LARGE_LEAF_BYTES = 4 * MIB
"""A gradient of at least this size is reduced where it lies: a copy would cost more than one more operand, some 2 ms
between processes on CPUs. Of 1, 4 and any MiB, 4 gave the fastest steps of a transformer and a ResNet."""


def check_strategy(strategy: str | None) -> None:
    """Raises ValueError unless `strategy` is a known one or None."""
    if strategy is not None and strategy not in get_args(Strategy):
        raise ValueError(f"strategy takes {', '.join(map(repr, get_args(Strategy)))} or None, not {strategy!r}")


def default_strategy() -> Strategy:
    """Returns "flat" when the replicas are in several processes, "tuple" within one."""
    return "flat" if jax.process_count() > 1 else "tuple"


def mean(local: Sequence[jax.Array], axes: tuple[str, ...], strategy: Strategy, turns: Turns) -> list[jax.Array]:
    """Returns the means over the axes of a bucket's local gradients, all of one dtype."""
    means: list[Any] = [None] * len(local)
    alone = set(range(len(local)))
    for positions in _packs(local) if strategy == "flat" else []:
        arrays = [local[i] for i in positions]
        (flat,) = _all_reduce([turns.pack(arrays)], axes)
        for i, array in zip(positions, unpack(turns.reduced(flat), arrays), strict=True):
            means[i] = array
        alone.difference_update(positions)
    unpacked = sorted(alone)
    for i, array in zip(unpacked, _all_reduce([local[i] for i in unpacked], axes), strict=True):
        means[i] = array
    return means


def _packs(local: Sequence[jax.Array]) -> list[list[int]]:
    """Returns the positions of the arrays that are packed, two or more together."""
    packs: list[list[int]] = []
    for group in alike(local):
        room = -1
        for i in group:
            if local[i].nbytes >= LARGE_LEAF_BYTES:
                continue
            if local[i].nbytes > room:
                packs.append([])
                room = PACKED_BYTES
            packs[-1].append(i)
            room -= local[i].nbytes
    return [positions for positions in packs if len(positions) > 1]


def _all_reduce(arrays: Sequence[jax.Array], axes: tuple[str, ...]) -> list[jax.Array]:
    """Returns the means of arrays of one dtype: divided before they are summed, as in torch, or with the same bits.

    Division by a power of two commutes with rounding, and XLA fuses one that comes after the sum with the update, which
    saves a kernel an array; but it must come before the sum where the sum may overflow.
    """
    if not arrays:
        return []
    replicas = replica_count(axes)
    if replicas & (replicas - 1) or arrays[0].dtype == jnp.float16:
        return list(lax.psum([array / replicas for array in arrays], axes))
    return [total / replicas for total in lax.psum(list(arrays), axes)]
