"""An equinox module, on all devices of this process."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from unified_ddp.jax import DistributedDataParallel

model = eqx.nn.MLP(in_size=3, out_size=1, width_size=16, depth=1, activation=jnp.tanh, key=jax.random.key(0))
params, static = eqx.partition(model, eqx.is_array)


def loss_fn(params, batch):
    model = eqx.combine(params, static)
    return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)


step = DistributedDataParallel(params).train_step(loss_fn, optax.adam(1e-2))
state = step.init(params)
random = np.random.default_rng(0)
for _ in range(200):
    x = random.normal(size=(64, 3)).astype(np.float32)
    state, loss = step(state, {"x": x, "y": x.sum(axis=1, keepdims=True)})
model = eqx.combine(state.params, static)
print(f"{jax.device_count()} devices: loss {loss:.6f}, model(1, 1, 1) {model(jnp.ones(3))[0]:.3f}")
