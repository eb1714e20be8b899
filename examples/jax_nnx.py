"""flax nnx with batch norm and dropout, on all devices of this process."""

import jax
import numpy as np
import optax
from flax import nnx

from unified_ddp.jax import DistributedDataParallel


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(8, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.1)
        self.out = nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, x, rngs=None):
        return self.out(self.dropout(nnx.relu(self.norm(self.hidden(x))), rngs=rngs))


model = Net(nnx.Rngs(0))
graph, params, buffers = nnx.split(model, nnx.Param, ...)


def loss_fn(params, batch, buffers, rng):
    model = nnx.merge(graph, params, buffers)
    model.train()
    logits = model(batch["x"], nnx.Rngs(dropout=rng))
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    return loss, nnx.split(model, nnx.Param, ...)[2]


step = DistributedDataParallel(params).train_step(loss_fn, optax.adam(1e-2))
state = step.init(params, buffers)
random = np.random.default_rng(0)
for _ in range(200):
    x = random.normal(size=(64, 8)).astype(np.float32)
    state, loss = step(state, {"x": x, "label": x[:, :4].argmax(1)}, jax.random.key(1))
nnx.update(model, state.params, state.buffers)
model.eval()
x = random.normal(size=(256, 8)).astype(np.float32)
accuracy = (model(x).argmax(1) == x[:, :4].argmax(1)).mean()
print(f"{jax.device_count()} devices: loss {loss:.6f}, accuracy {accuracy:.3f}")
