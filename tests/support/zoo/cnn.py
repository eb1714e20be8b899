"""Convolutions with biases before batch norm, pooling, flattening and linear layers: torch and nnx."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch import nn

from support.zoo import losses
from unified_ddp.equivalence import JaxSide, Pair, TorchSide


class TorchCnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.bn2 = nn.BatchNorm2d(8)
        self.fc1 = nn.Linear(8 * 4 * 4, 16)
        self.fc2 = nn.Linear(16, 10)

    def forward(self, x):
        x = nn.functional.silu(self.bn1(self.conv1(x)))
        x = nn.functional.silu(self.bn2(self.conv2(x)))
        x = nn.functional.avg_pool2d(x, 3, stride=1, padding=1).flatten(1)
        return self.fc2(nn.functional.gelu(self.fc1(x)))


class BatchNorm(nnx.Module):
    """flax's own keeps the biased variance."""

    def __init__(self, size, *, eps=1e-5, momentum=0.1, unbiased=True) -> None:
        self.scale, self.bias = nnx.Param(jnp.ones(size)), nnx.Param(jnp.zeros(size))
        self.mean, self.var = nnx.BatchStat(jnp.zeros(size)), nnx.BatchStat(jnp.ones(size))
        self.eps, self.momentum, self.unbiased = eps, momentum, unbiased

    def __call__(self, x):
        axes = tuple(range(x.ndim - 1))
        mean, var = x.mean(axes), x.var(axes)
        count = x.size // x.shape[-1]
        kept = var * count / (count - 1) if self.unbiased else var
        self.mean[...] = (1 - self.momentum) * self.mean[...] + self.momentum * jax.lax.stop_gradient(mean)
        self.var[...] = (1 - self.momentum) * self.var[...] + self.momentum * jax.lax.stop_gradient(kept)
        return (x - mean) * jax.lax.rsqrt(var + self.eps) * self.scale[...] + self.bias[...]


class JaxCnn(nnx.Module):
    def __init__(
        self,
        rngs,
        *,
        padding=((1, 1), (1, 1)),
        approximate=False,
        channels_first_flatten=True,
        count_padding=True,
        dropped_bias=False,
        **norm,
    ) -> None:
        self.conv1 = nnx.Conv(3, 8, (3, 3), padding=1, rngs=rngs)
        self.bn1 = BatchNorm(8, **norm)
        self.conv2 = nnx.Conv(8, 8, (3, 3), strides=2, padding=padding, rngs=rngs)
        self.bn2 = BatchNorm(8, **norm)
        self.fc1 = nnx.Linear(8 * 4 * 4, 16, rngs=rngs)
        self.fc2 = nnx.Linear(16, 10, rngs=rngs)
        self.approximate, self.channels_first_flatten = approximate, channels_first_flatten
        self.count_padding, self.dropped_bias = count_padding, dropped_bias

    def __call__(self, x):
        x = nnx.silu(self.bn1(self.conv1(x)))
        x = nnx.silu(self.bn2(self.conv2(x)))
        pads = ((1, 1), (1, 1))
        x = nnx.avg_pool(x, (3, 3), strides=(1, 1), padding=pads, count_include_pad=self.count_padding)
        if self.channels_first_flatten:
            x = x.transpose(0, 3, 1, 2)
        x = x.reshape(x.shape[0], -1)
        x = x @ self.fc1.kernel[...] if self.dropped_bias else self.fc1(x)
        return self.fc2(nnx.gelu(x, approximate=self.approximate))


def batches(count=1, size=8):
    random = np.random.default_rng(1)
    return [
        {"x": random.normal(size=(size, 3, 8, 8)).astype(np.float32), "y": random.integers(0, 10, size)}
        for _ in range(count)
    ]


def pair(loss=losses.jax_classify, torch_optimizer=None, jax_optimizer=None, rules=None, **options) -> Pair:
    torch.manual_seed(0)
    return Pair(
        TorchSide(TorchCnn(), losses.torch_classify, torch_optimizer),
        JaxSide(JaxCnn(nnx.Rngs(0), **options), loss, jax_optimizer),
        batches(),
        layout={"x": "NCHW -> NHWC"},
        rules=rules,
    )
