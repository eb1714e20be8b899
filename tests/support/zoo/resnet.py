"""A small ResNet: torch, and flax linen with batch statistics outside the parameters."""

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch import nn

from support.zoo import losses
from unified_ddp.equivalence import JaxSide, Pair, TorchSide


class TorchBlock(nn.Module):
    def __init__(self, inputs, outputs, stride) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride > 1:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        out = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(out + (x if self.downsample is None else self.downsample(x)))


class TorchResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(TorchBlock(8, 8, 1), TorchBlock(8, 8, 1))
        self.layer2 = nn.Sequential(TorchBlock(8, 16, 2))
        self.fc = nn.Linear(16, 5)

    def forward(self, x):
        x = self.layer2(self.layer1(torch.relu(self.bn1(self.conv1(x)))))
        return self.fc(x.mean((2, 3)))


class BatchNorm(linen.Module):
    @linen.compact
    def __call__(self, x):
        size = x.shape[-1]
        scale = self.param("scale", linen.initializers.ones, (size,))
        bias = self.param("bias", linen.initializers.zeros, (size,))
        mean = self.variable("batch_stats", "mean", jnp.zeros, (size,))
        var = self.variable("batch_stats", "var", jnp.ones, (size,))
        here, spread = x.mean((0, 1, 2)), x.var((0, 1, 2))
        count = x.size // size
        if not self.is_initializing():
            mean.value = 0.9 * mean.value + 0.1 * jax.lax.stop_gradient(here)
            var.value = 0.9 * var.value + 0.1 * jax.lax.stop_gradient(spread * count / (count - 1))
        return (x - here) * jax.lax.rsqrt(spread + 1e-5) * scale + bias


class Block(linen.Module):
    size: int
    stride: int

    @linen.compact
    def __call__(self, x):
        conv = lambda name, kernel, stride, pad: linen.Conv(  # noqa: E731
            self.size, (kernel, kernel), stride, padding=pad, use_bias=False, name=name
        )
        out = linen.relu(BatchNorm(name="bn1")(conv("conv1", 3, self.stride, 1)(x)))
        out = BatchNorm(name="bn2")(conv("conv2", 3, 1, 1)(out))
        if self.stride > 1:
            x = BatchNorm(name="downsample_bn")(conv("downsample_conv", 1, self.stride, 0)(x))
        return linen.relu(out + x)


class ResNet(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.relu(BatchNorm(name="bn1")(linen.Conv(8, (3, 3), padding=1, use_bias=False, name="conv1")(x)))
        for name, size, stride in (("layer1_0", 8, 1), ("layer1_1", 8, 1), ("layer2_0", 16, 2)):
            x = Block(size, stride, name=name)(x)
        return linen.Dense(5, name="fc")(x.mean((1, 2)))


def jax_loss(params, batch, buffers):
    logits, changed = ResNet().apply({"params": params, "batch_stats": buffers}, batch["x"], mutable=["batch_stats"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
    return loss, changed["batch_stats"], logits


def pair() -> Pair:
    torch.manual_seed(0)
    random = np.random.default_rng(4)
    batch = {"x": random.normal(size=(8, 3, 6, 6)).astype(np.float32), "y": random.integers(0, 5, 8)}
    variables = ResNet().init(jax.random.key(0), jnp.zeros((1, 6, 6, 3)))
    return Pair(
        TorchSide(TorchResNet(), losses.torch_classify),
        JaxSide(variables["params"], jax_loss, buffers=variables["batch_stats"]),
        [batch],
        layout={"x": "NCHW -> NHWC"},
    )
