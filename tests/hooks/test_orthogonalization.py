"""Orthonormal columns, and what becomes of dependent ones."""

import numpy as np

from unified_ddp.hooks.ops import Ops
from unified_ddp.hooks.orthogonalization import gram_schmidt, unit_columns


def test_dependent_columns_become_zero() -> None:
    column = np.random.default_rng(0).normal(size=(1, 9, 1))
    result = gram_schmidt(Ops(), np.concatenate([column, 3 * column, column**2], axis=2), "float64")
    assert np.allclose(result[0].T @ result[0], np.diag([1.0, 0.0, 1.0]))


def test_columns_without_a_length_are_replaced() -> None:
    matrices = np.array([[[3.0, 0.0, np.inf], [4.0, 0.0, 1.0]]])
    with np.errstate(invalid="ignore"):
        result = unit_columns(Ops(), matrices, np.ones_like(matrices))
    np.testing.assert_allclose(result, [[[0.6, 1, 1], [0.8, 1, 1]]])
