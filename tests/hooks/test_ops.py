"""Each framework's operations against numpy's, on what they might do differently."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from unified_ddp.hooks.collectives import Gather, drive
from unified_ddp.hooks.ops import Ops


def torchs() -> Ops:
    torch = pytest.importorskip("torch")
    from unified_ddp.torch.comm_hooks.ops import TorchOps

    return TorchOps(torch.device("cpu"))


def jaxs() -> Ops:
    pytest.importorskip("jax")
    from unified_ddp.jax.comm_hooks.shared import JaxOps

    return JaxOps(())


A = np.array([[1.5, -2.5, 0.5], [np.nan, 3.0, -0.0]], np.float32)
FLAT = np.arange(1, 8, dtype=np.float32)
MATRICES = np.random.default_rng(0).normal(size=(2, 5, 3)).astype(np.float32)
TIES = np.array([1, 3, 2, 3, 3, 0], np.float32)
INDICES = np.array([[0, 3], [3, 1], [3, 0]], np.int32)
VALUES = np.array([[5, 1e8], [1, 2], [-1e8, 3]], np.float32)

CASES: dict[str, tuple[Callable[[Ops, Callable[[Any], Any]], Any], Any]] = {
    "sqrt": (lambda ops, a: ops.sqrt(a(FLAT)), np.sqrt(FLAT)),
    "log": (lambda ops, a: ops.log(a(FLAT)), np.log(FLAT)),
    "cos": (lambda ops, a: ops.cos(a(FLAT)), np.cos(FLAT)),
    "round halves to even": (lambda ops, a: ops.round(a(A[0])), [2, -2, 0]),
    "where, with numbers": (lambda ops, a: ops.where(a(A) > 0, a(A), 0.0), [[1.5, 0, 0.5], [0, 3, 0]]),
    "where, broadcast": (lambda ops, a: ops.where(a(A[:, :1]) > 0, 1.0, a(A[0])), [[1, 1, 1], A[0]]),
    "cast to a narrow float": (lambda ops, a: ops.cast(ops.cast(a(FLAT / 3), "float16"), "float32"), None),
    "cast to bytes": (lambda ops, a: ops.cast(a(A[0]), "int8"), [1, -2, 0]),
    "words wrap": (lambda ops, a: (a(np.uint32([2**32 - 1])) + a(np.uint32([2]))) & a(np.uint32(2**32 - 1)), [1]),
    "zeros": (lambda ops, a: ops.zeros(3, "float16"), [0, 0, 0]),
    "concat": (lambda ops, a: ops.concat([a(A), a(A[:, :1])], axis=1), np.concatenate([A, A[:, :1]], 1)),
    "split, with an empty piece": (
        lambda ops, a: ops.concat(ops.split(a(FLAT), [3, 0, 4])[::-1]),
        [4, 5, 6, 7, 1, 2, 3],
    ),
    "stack": (lambda ops, a: ops.stack([a(FLAT), a(FLAT)]), [FLAT, FLAT]),
    "matmul": (lambda ops, a: ops.matmul(a(MATRICES), a(MATRICES).swapaxes(1, 2)), MATRICES @ MATRICES.swapaxes(1, 2)),
    "amax sees NaN": (lambda ops, a: ops.amax(a(A)), [[1.5], [np.nan]]),
    "qr": (lambda ops, a: abs(ops.qr(a(MATRICES))), abs(np.linalg.qr(MATRICES).Q)),
    "top_k takes the first of equals": (lambda ops, a: sorted(np.asarray(ops.top_k(a(TIES), 2)).tolist()), [1, 3]),
    "scatter_add, in the order of ranks": (
        lambda ops, a: ops.scatter_add(ops.zeros(4, "float32"), a(INDICES), a(VALUES)),
        [8, 2, 0, 0],  # in another order 1 would be left
    ),
}


@pytest.mark.parametrize("make", [Ops, torchs, jaxs], ids=["numpy", "torch", "jax"])
@pytest.mark.parametrize("case", CASES)
def test_the_same_in_every_framework(make: Callable[[], Ops], case: str) -> None:
    run, want = CASES[case]
    ops = make()
    if want is None:
        want = np.asarray(run(Ops(), np.asarray))
    np.testing.assert_allclose(np.asarray(run(ops, ops.from_numpy)), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [Ops, torchs, jaxs], ids=["numpy", "torch", "jax"])
def test_dtypes(make: Callable[[], Ops]) -> None:
    ops = make()
    floats = ops.from_numpy(FLAT)
    for dtype in ("float16", "float32", "int8", "int32"):
        assert str(ops.cast(floats, dtype).dtype).removeprefix("torch.") == dtype
        assert str(ops.zeros(2, dtype).dtype).removeprefix("torch.") == dtype
    assert str(ops.top_k(floats, 2).dtype).removeprefix("torch.") == "int32"


@pytest.mark.parametrize("make", [Ops, torchs], ids=["numpy", "torch"])
@pytest.mark.parametrize("holds", [True, False])
def test_one_branch_runs(make: Callable[[], Ops], holds: bool) -> None:
    ops = make()

    def ask(what: str) -> Any:
        return (yield Gather(what)), {}

    steps = ops.branch(ops.from_numpy(np.array(holds)), lambda: ask("yes"), lambda: ask("no"))
    assert drive(steps, lambda request: request.array) == ("yes" if holds else "no", {})
