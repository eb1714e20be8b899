"""Grouped, depthwise and transposed convolutions; norms; padding_idx; mixture of experts; complex weights."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch import nn

from support.zoo import losses
from unified_ddp.equivalence import JaxSide, Pair, TorchSide


class TorchConvs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.grouped = nn.Conv2d(4, 8, 3, padding=1, groups=2)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.transposed = nn.ConvTranspose2d(8, 8, 3, stride=2, padding=1)
        self.temporal = nn.Conv1d(8, 3, 3)

    def forward(self, x):
        x = torch.tanh(self.transposed(torch.tanh(self.depthwise(torch.tanh(self.grouped(x))))))
        return self.temporal(x.mean(3))


class JaxConvs(nnx.Module):
    def __init__(self, rngs) -> None:
        self.grouped = nnx.Conv(4, 8, (3, 3), padding=1, feature_group_count=2, rngs=rngs)
        self.depthwise = nnx.Conv(8, 8, (3, 3), padding=1, feature_group_count=8, rngs=rngs)
        self.transposed = nnx.ConvTranspose(8, 8, (3, 3), strides=2, padding=((1, 1), (1, 1)), rngs=rngs)
        self.temporal = nnx.Conv(8, 3, (3,), padding="VALID", rngs=rngs)

    def __call__(self, x):
        x = jnp.tanh(self.transposed(jnp.tanh(self.depthwise(jnp.tanh(self.grouped(x))))))
        return self.temporal(x.mean(2)).transpose(0, 2, 1)


def convs() -> Pair:
    torch.manual_seed(0)
    random = np.random.default_rng(6)
    batch = {
        "x": random.normal(size=(4, 4, 5, 5)).astype(np.float32),
        "y": random.normal(size=(4, 3, 7)).astype(np.float32),
    }
    return Pair(
        TorchSide(TorchConvs(), losses.torch_regress),
        JaxSide(JaxConvs(nnx.Rngs(0)), losses.jax_regress),
        [batch],
        layout={"x": "NCHW -> NHWC"},
    )


class TorchNorms(nn.Module):
    def __init__(self, padding_idx=0) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=padding_idx)
        self.group_norm, self.rms_norm = nn.GroupNorm(2, 8), nn.RMSNorm(8, eps=1e-6)
        self.layer_norm = nn.LayerNorm(8, eps=1e-6)
        self.dense = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = self.group_norm(x.transpose(1, 2)).transpose(1, 2)
        x = self.layer_norm(nn.functional.gelu(self.dense(self.rms_norm(x))))
        return self.head(x)


class JaxNorms(nnx.Module):
    def __init__(self, rngs, *, padding_idx=0, eps=1e-6) -> None:
        self.embed = nnx.Embed(11, 8, rngs=rngs)
        self.group_norm = nnx.GroupNorm(8, num_groups=2, epsilon=1e-5, use_fast_variance=False, rngs=rngs)
        self.rms_norm = nnx.RMSNorm(8, epsilon=1e-6, use_fast_variance=False, rngs=rngs)
        self.layer_norm = nnx.LayerNorm(8, epsilon=eps, use_fast_variance=False, rngs=rngs)
        self.dense = nnx.Linear(8, 8, rngs=rngs)
        self.head = nnx.Linear(8, 4, rngs=rngs)
        self.padding_idx = padding_idx

    def __call__(self, tokens):
        x = self.embed(tokens)
        if self.padding_idx is not None:
            x = jnp.where((tokens == self.padding_idx)[..., None], jax.lax.stop_gradient(x), x)
        x = self.layer_norm(nnx.gelu(self.dense(self.rms_norm(self.group_norm(x))), approximate=False))
        return self.head(x)


def norms(**options) -> Pair:
    torch.manual_seed(0)
    random = np.random.default_rng(7)
    batch = {"x": random.integers(0, 11, (4, 6)), "y": random.integers(0, 4, (4, 6))}
    batch["x"][0, 0] = 0
    return Pair(
        TorchSide(TorchNorms(), losses.torch_classify),
        JaxSide(JaxNorms(nnx.Rngs(0), **options), losses.jax_classify),
        [batch],
    )


EXPERTS, CHOSEN = 4, 2


class TorchExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, 6, 8) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, 8, 6) / 3)

    def forward(self, x):
        chosen = self.router(x).topk(CHOSEN, dim=-1)
        gates = torch.zeros(*x.shape[:-1], EXPERTS, dtype=x.dtype)
        gates = gates.scatter(-1, chosen.indices, chosen.values.softmax(-1))
        hidden = torch.relu(torch.einsum("bd,edh->beh", x, self.up))
        return torch.einsum("beh,ehd,be->bd", hidden, self.down, gates)


class JaxExperts(nnx.Module):
    def __init__(self, rngs, *, renormalise=True) -> None:
        self.router = nnx.Linear(6, EXPERTS, use_bias=False, rngs=rngs)
        self.up, self.down = nnx.Param(jnp.zeros((EXPERTS, 6, 8))), nnx.Param(jnp.zeros((EXPERTS, 8, 6)))
        self.renormalise = renormalise

    def __call__(self, x):
        logits = self.router(x)
        values, indices = jax.lax.top_k(logits, CHOSEN)
        probabilities = jax.nn.softmax(values if self.renormalise else logits, axis=-1)
        if not self.renormalise:
            probabilities = jnp.take_along_axis(probabilities, indices, -1)
        gates = jnp.zeros_like(logits).at[jnp.arange(len(x))[:, None], indices].set(probabilities)
        hidden = jax.nn.relu(jnp.einsum("bd,edh->beh", x, self.up[...]))
        return jnp.einsum("beh,ehd,be->bd", hidden, self.down[...], gates)


def experts(**options) -> Pair:
    torch.manual_seed(0)
    random = np.random.default_rng(8)
    draw = lambda: random.normal(size=(12, 6)).astype(np.float32)  # noqa: E731
    return Pair(
        TorchSide(TorchExperts(), losses.torch_regress),
        JaxSide(JaxExperts(nnx.Rngs(0), **options), losses.jax_regress),
        [{"x": draw(), "y": draw()}],
    )


class TorchComplex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.spectrum = nn.Parameter(torch.randn(5, 4, dtype=torch.complex64) / 3)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        spectrum = torch.fft.rfft(x, dim=1) * self.spectrum
        return self.head(torch.fft.irfft(spectrum, n=8, dim=1).mean(2))


def complex_call(params, x):
    spectrum = jnp.fft.rfft(x, axis=1) * params["spectrum"]
    hidden = jnp.fft.irfft(spectrum, n=8, axis=1).mean(2)
    return hidden @ params["head"]["w"] + params["head"]["b"]


def complex_loss(params, batch):
    out = complex_call(params, batch["x"])
    return jnp.mean((out - batch["y"]) ** 2), out


def complex_pair(loss=complex_loss, torch_optimizer=None, jax_optimizer=None) -> Pair:
    torch.manual_seed(0)
    random = np.random.default_rng(9)
    params = {
        "spectrum": jnp.zeros((5, 4), jnp.complex64),
        "head": {"w": jnp.zeros((8, 3)), "b": jnp.zeros(3)},
    }
    batch = {
        "x": random.normal(size=(4, 8, 4)).astype(np.float32),
        "y": random.normal(size=(4, 3)).astype(np.float32),
    }
    return Pair(
        TorchSide(TorchComplex(), losses.torch_regress, torch_optimizer),
        JaxSide(params, loss, jax_optimizer),
        [batch],
    )
