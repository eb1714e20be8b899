"""flax linen with batch norm and dropout, on all devices of this process."""

import jax
import numpy as np
import optax
from flax import linen as nn

from unified_ddp.jax import DistributedDataParallel


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Dense(32)(x)))
        return nn.Dense(4)(nn.Dropout(0.1, deterministic=not train)(x))


net = Net()
variables = net.init(jax.random.key(0), np.zeros((1, 8), np.float32), train=False)
params, buffers = variables["params"], variables["batch_stats"]


def loss_fn(params, batch, buffers, rng):
    logits, changed = net.apply(
        {"params": params, "batch_stats": buffers}, batch["x"], train=True, mutable="batch_stats", rngs={"dropout": rng}
    )
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    accuracy = (logits.argmax(1) == batch["label"]).mean()
    return loss, changed["batch_stats"], {"accuracy": accuracy}


step = DistributedDataParallel(params).train_step(loss_fn, optax.adam(1e-2), has_aux=True)
state = step.init(params, buffers)
random = np.random.default_rng(0)
for _ in range(200):
    x = random.normal(size=(64, 8)).astype(np.float32)
    batch = {"x": x, "label": x[:, :4].argmax(1)}
    state, (loss, metrics) = step(state, batch, jax.random.key(1))  # each step and replica folds its own key from it
print(f"{jax.device_count()} devices: loss {loss:.6f}, accuracy {metrics['accuracy']:.3f}")
