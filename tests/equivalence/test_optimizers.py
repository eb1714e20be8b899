"""optax inside a step against torch.optim, given the same gradients."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from unified_ddp.jax import DistributedDataParallel


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("momentum", "tolerance"), [(None, 0.0), (0.9, 1e-6)])
def test_sgd_is_torchs(momentum: float | None, tolerance: float) -> None:
    """Bit by bit without momentum. With it, torch rounds the decayed momentum before it adds, and XLA does not."""
    start = np.random.default_rng(0).normal(size=(64, 33)).astype(np.float32)
    gradients = np.random.default_rng(1).normal(size=(20, *start.shape)).astype(np.float32)

    def loss(params: dict[str, jnp.ndarray], batch: jnp.ndarray) -> jnp.ndarray:
        return jnp.sum(params["w"] * batch[0])  # its gradient is the batch

    step = DistributedDataParallel({"w": start}).train_step(loss, optax.sgd(0.1, momentum=momentum))
    state = step.init({"w": start})
    replicas = step.mesh.size
    param = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = torch.optim.SGD([param], lr=0.1, momentum=momentum or 0.0)
    for gradient in gradients:
        state, _ = step(state, np.broadcast_to(gradient, (replicas, *gradient.shape)))  # the mean of equals is exact
        param.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
        difference = np.abs(np.asarray(state.params["w"]) - param.detach().numpy())
        assert difference.max() <= tolerance * np.abs(start).max()
