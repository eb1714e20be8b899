"""Orthonormal columns of many small matrices at once, shape (k, rows, columns)."""

import numpy as np

from unified_ddp.hooks.collectives import Array
from unified_ddp.hooks.ops import Ops


def gram_schmidt(ops: Ops, matrices: Array, dtype: str) -> Array:
    """Returns matrices with orthonormal columns that span what the columns given span.

    Each column is taken twice against those before, after which no more than rounding is left. A column that depends
    on them to within rounding becomes zero: noise made a unit vector would be another one in each framework.
    """
    least = 100 * float(np.finfo(dtype).eps)
    columns = _unit_or_zero(ops, matrices, 0.0)
    done = columns[:, :, :1]
    for i in range(1, matrices.shape[2]):
        column = columns[:, :, i : i + 1]
        for _ in range(2):
            column = column - ops.matmul(done, ops.matmul(done.swapaxes(1, 2), column))
        done = ops.concat([done, _unit_or_zero(ops, column, least)], axis=2)
    return done


def unit_columns(ops: Ops, matrices: Array, otherwise: Array) -> Array:
    """Returns the matrices with columns of length 1; where a length is zero or not finite, the other's column."""
    lengths = _lengths(ops, matrices)
    usable = (lengths > 0) & (lengths - lengths == 0)
    return ops.where(usable, matrices / ops.where(usable, lengths, 1.0), otherwise)


def _unit_or_zero(ops: Ops, columns: Array, least: float) -> Array:
    lengths = _lengths(ops, columns)
    short = lengths <= least  # not so of NaN, which is to be seen in the result
    return ops.where(short, 0.0, columns / ops.where(short, 1.0, lengths))


def _lengths(ops: Ops, columns: Array) -> Array:
    # Squares of small gradients are zero in float32, those of large ones infinite.
    largest = ops.amax(abs(columns.swapaxes(1, 2))).swapaxes(1, 2)
    scaled = columns / ops.where(largest > 0, largest, 1.0)
    return ops.sqrt((scaled * scaled).sum(1)[:, None]) * largest
