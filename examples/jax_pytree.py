"""A pytree of arrays and optax, on all devices of this process."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from unified_ddp.jax import DistributedDataParallel

params = {"hidden": 0.3 * jax.random.normal(jax.random.key(0), (3, 16)), "out": jnp.zeros((16, 1))}


def loss_fn(params, batch):  # of one replica's rows
    predicted = jnp.tanh(batch["x"] @ params["hidden"]) @ params["out"]
    return jnp.mean((predicted - batch["y"]) ** 2)


step = DistributedDataParallel(params).train_step(loss_fn, optax.adam(1e-2))
state = step.init(params)
random = np.random.default_rng(0)
for _ in range(200):
    x = random.normal(size=(64, 3)).astype(np.float32)
    state, loss = step(state, {"x": x, "y": x.sum(axis=1, keepdims=True)})
print(f"{jax.device_count()} devices: loss {loss:.6f}")
