"""One model in torch and in JAX: gradients of torch ranks, and of JAX replicas that vmap maps on one device."""

import numpy as np
import torch
from torch import nn

SHAPES = {"0.weight": (32, 8), "0.bias": (32,), "2.weight": (4, 32), "2.bias": (4,)}


def values(size: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns parameters by torch's names, and inputs of shape (size, 6, 8)."""
    random = np.random.default_rng(0)
    params = {name: random.normal(size=shape).astype(np.float32) / 3 for name, shape in SHAPES.items()}
    return params, random.normal(size=(size, 6, 8)).astype(np.float32)


def jax_gradients(platform: str, size: int) -> dict[str, np.ndarray]:
    """Returns every replica's reduced gradients, along the first axis, from the platform's first device."""
    import jax
    import jax.numpy as jnp

    from unified_ddp.jax import DistributedDataParallel

    params, inputs = values(size)
    ddp = DistributedDataParallel(params, axis_name="data", bucket_cap_mb=0.0005)

    def loss_fn(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        hidden = jnp.tanh(x @ params["0.weight"].T + params["0.bias"])
        return jnp.mean((hidden @ params["2.weight"].T + params["2.bias"]) ** 2)

    device = jax.devices(platform)[0]
    with jax.default_device(device), jax.default_matmul_precision("highest"):
        mapped = jax.vmap(lambda p, x: ddp.value_and_grad(loss_fn)(p, x)[1], axis_name="data", in_axes=(None, 0))
        grads = jax.jit(mapped)(params, inputs)
    assert all(g.devices() == {device} for g in grads.values())
    return {name: np.asarray(g) for name, g in grads.items()}


def case_torch(rank: int, world_size: int, device: str) -> dict[str, np.ndarray]:
    from support.device_cases import backward, device_of, wrap

    params, inputs = values(world_size)
    module = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    module.load_state_dict({name: torch.from_numpy(value) for name, value in params.items()})
    ddp = wrap(module, device, bucket_cap_mb=0.0005)
    backward(ddp, torch.from_numpy(inputs[rank]).to(device_of(device)))
    return {name: p.grad.cpu().numpy() for name, p in ddp.module.named_parameters()}


def assert_agree(jaxs: dict[str, np.ndarray], ranks: list[dict[str, np.ndarray]]) -> None:
    for torchs in ranks:
        assert torchs.keys() == jaxs.keys()
        for name, reference in torchs.items():
            for replica in jaxs[name]:
                assert np.abs(replica - reference).max() <= 1e-5 * np.abs(reference).max(), name
