"""Sums and means over mapped axes: which arrays are packed, and which are operands of one all-reduce as they are.

Measured on CPU: every operand of an all-reduce costs a round trip, of about 0.5 ms between processes and 0.1 ms in one,
so small gradients are packed; but that takes up to 0.2 times longer to compile, and in one process it is left to users.
"""

from collections.abc import Sequence
from typing import Literal, get_args

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
    """Returns the means over the axes of a bucket's local gradients, all of one dtype.

    They are divided before they are summed, as in torch, or with the same bits: division by a power of two commutes
    with rounding, and XLA fuses one that comes after the sum with the update, which saves a kernel an array; but it
    must come before the sum where the sum may overflow.
    """
    replicas = replica_count(axes)
    if replicas & (replicas - 1) or local[0].dtype == jnp.float16:
        return all_reduce([array / replicas for array in local], axes, strategy, turns)
    return [total / replicas for total in all_reduce(local, axes, strategy, turns)]


def all_reduce(arrays: Sequence[jax.Array], axes: tuple[str, ...], strategy: Strategy, turns: Turns) -> list[jax.Array]:
    """Returns the sums of arrays over the axes; "flat" packs small ones together, each pack after the one before."""
    sums: dict[int, jax.Array] = {}
    for positions in _packs(arrays) if strategy == "flat" else []:
        parts = [arrays[i] for i in positions]
        flat = turns.reduced(lax.psum(turns.pack(parts), axes))
        sums.update(zip(positions, unpack(flat, parts), strict=True))
    alone = [i for i in range(len(arrays)) if i not in sums]
    sums.update(zip(alone, lax.psum([arrays[i] for i in alone], axes) if alone else [], strict=True))
    return [sums[i] for i in range(len(arrays))]


def _packs(arrays: Sequence[jax.Array]) -> list[list[int]]:
    """Returns the positions of the arrays that are packed, two or more together."""
    packs: list[list[int]] = []
    for group in alike(arrays):
        room = -1
        for i in group:
            if arrays[i].nbytes >= LARGE_LEAF_BYTES:
                continue
            if arrays[i].nbytes > room:
                packs.append([])
                room = PACKED_BYTES
            packs[-1].append(i)
            room -= arrays[i].nbytes
    return [positions for positions in packs if len(positions) > 1]
