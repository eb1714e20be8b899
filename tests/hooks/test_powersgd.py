"""PowerSGD against linear algebra."""

from typing import Any

import numpy as np
import pytest
from support.hook_buckets import LAYOUT, buffers, start
from support.host_ranks import reduce_on_host

from unified_ddp.hooks import BucketLayout, PowerSGD


def test_power_sgd_is_a_step_of_subspace_iteration() -> None:
    hook, local = PowerSGD(rank=3), buffers(0)
    states = start(hook)
    matrix = np.mean(local, axis=0)[10:250].reshape(12, 20)
    basis = np.linalg.qr(matrix @ states[0]["q"][0][0]).Q
    reduced, states = reduce_on_host(hook, LAYOUT, states, local)
    assert np.allclose(reduced[0][10:250].reshape(12, 20), basis @ basis.T @ matrix, atol=1e-12)
    assert np.allclose(reduced[0][[*range(10), 250]], np.mean(local, axis=0)[[*range(10), 250]])
    # Warm start goes on from Q = M^T P, of which only the directions of the columns count.
    q = matrix.T @ basis
    assert np.allclose(np.abs(states[0]["q"][0][0]), np.abs(q / np.linalg.norm(q, axis=0)), atol=1e-10)


def test_power_sgd_loses_nothing_at_full_rank() -> None:
    for orthogonalization in ("gram_schmidt", "qr"):
        hook = PowerSGD(rank=12, min_compression_rate=0, orthogonalization=orthogonalization)
        reduced, _ = reduce_on_host(hook, LAYOUT, start(hook), buffers(0))
        assert np.allclose(reduced[0], np.mean(buffers(0), axis=0), atol=1e-12)


def test_warm_start_finds_the_best_approximation() -> None:
    hook = PowerSGD(rank=2, error_feedback=False)
    states, local = start(hook), buffers(0)
    for _ in range(300):
        reduced, states = reduce_on_host(hook, LAYOUT, states, local)
    u, s, v = np.linalg.svd(np.mean(local, axis=0)[10:250].reshape(12, 20))
    assert np.allclose(reduced[0][10:250].reshape(12, 20), u[:, :2] * s[:2] @ v[:2], atol=1e-6)


@pytest.mark.parametrize("shape", [(64, 32, 3, 3), (3, 3, 32, 64)])
def test_a_kernel_is_split_where_least_is_sent(shape: tuple[int, ...]) -> None:
    """Torch's kernels have output channels first, JAX's last."""
    layout = BucketLayout(0, "float32", ("kernel",), (shape,))
    columns = PowerSGD(rank=1).init(layout)["q"][0].shape[1]
    assert columns + 64 * 32 * 9 // columns == 64 + 32 * 9


@pytest.mark.parametrize("scale", [0.0, 1e-25, 1e25])
def test_power_sgd_of_tiny_huge_and_no_gradients(scale: float) -> None:
    layout = BucketLayout(0, "float32", LAYOUT.names, LAYOUT.shapes)
    hook = PowerSGD(rank=12, min_compression_rate=0)
    states = start(hook, 2, layout)
    for step in range(3):
        local = [np.float32(scale) * b for b in buffers(step, 2, layout)]
        reduced, states = reduce_on_host(hook, layout, states, local)
        assert np.abs(reduced[0] - np.mean(local, axis=0)).max() <= 1e-4 * scale
    if scale > 1:
        return  # an error of one rounding is held
    # A parameter without gradients goes on with the Q that it had.
    reduced, _ = reduce_on_host(hook, layout, states, buffers(9, 2, layout))
    assert np.abs(reduced[0] - np.mean(buffers(9, 2, layout), axis=0)).max() < 1e-3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 0}, "PowerSGD takes a rank of 1 or more, not 0"),
        ({"orthogonalization": "svd"}, "orthogonalization takes 'gram_schmidt' or 'qr', not 'svd'"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PowerSGD(**arguments)
