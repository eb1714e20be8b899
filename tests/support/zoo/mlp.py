"""Two layers, cheap to run, for what is not about layers: optimizers, reductions, names."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from support.zoo import losses
from unified_ddp.equivalence import JaxSide, Pair, TorchSide


class TorchMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.fc2(torch.tanh(self.fc1(x)))


def params():
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "fc1": {"kernel": jax.random.normal(keys[0], (5, 6)), "bias": jnp.zeros(6)},
        "fc2": {"kernel": jax.random.normal(keys[1], (6, 3)), "bias": jnp.zeros(3)},
    }


def jax_call(params, x):
    hidden = jnp.tanh(x @ params["fc1"]["kernel"] + params["fc1"]["bias"])
    return hidden @ params["fc2"]["kernel"] + params["fc2"]["bias"]


def jax_loss(params, batch):
    out = jax_call(params, batch["x"])
    return jnp.mean((out - batch["y"]) ** 2), out


def batches(count=3, size=8):
    random = np.random.default_rng(11)
    draw = lambda width: random.normal(size=(size, width)).astype(np.float32)  # noqa: E731
    return [{"x": draw(5), "y": draw(3)} for _ in range(count)]


def torch_side(**options) -> TorchSide:
    torch.manual_seed(0)
    return TorchSide(TorchMlp(), losses.torch_regress, **options)


def jax_side(loss=jax_loss, **options) -> JaxSide:
    return JaxSide(params(), loss, **options)


def pair(torch_optimizer=None, jax_optimizer=None, **options) -> Pair:
    return Pair(torch_side(optimizer=torch_optimizer), jax_side(optimizer=jax_optimizer), batches(), **options)
