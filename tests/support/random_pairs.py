"""Random right pairs: stacks of random layers in torch and in plain JAX. None may be called wrong.

PYTHONPATH=tests python -m support.random_pairs --count 200
"""

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from unified_ddp.equivalence import JaxSide, Pair, TorchSide

EPS = 1e-5
Params = dict[str, jax.Array]
Call = Callable[[Params, jax.Array], jax.Array]

ACTIVATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "relu": (torch.relu, jax.nn.relu),
    "tanh": (torch.tanh, jnp.tanh),
    "silu": (nn.functional.silu, jax.nn.silu),
    "gelu": (nn.functional.gelu, lambda x: jax.nn.gelu(x, approximate=False)),
    "softplus": (nn.functional.softplus, jax.nn.softplus),
    "softmax": (lambda x: x.softmax(-1), jax.nn.softmax),
}


class Activation(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x):
        return ACTIVATIONS[self.name][0](x)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x):
        return self.attn(x, x, x, need_weights=False)[0]


class Residual(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x):
        return x + self.body(x)


def layer_norm(p, x):
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + EPS) * p["scale"] + p["bias"]


def attention(p, x):
    heads = {name: jnp.einsum("btd,dhe->bthe", x, p[name]["kernel"]) + p[name]["bias"] for name in _QKV}
    scores = jnp.einsum("bqhe,bkhe->bhqk", heads["query"], heads["key"]) / np.sqrt(heads["key"].shape[-1])
    mixed = jnp.einsum("bhqk,bkhe->bqhe", jax.nn.softmax(scores, -1), heads["value"])
    return jnp.einsum("bqhe,hed->bqd", mixed, p["out"]["kernel"]) + p["out"]["bias"]


_QKV = ("query", "key", "value")


def dense(inputs: int, outputs: int) -> tuple[nn.Module, dict, Call]:
    params = {"kernel": jnp.zeros((inputs, outputs)), "bias": jnp.zeros(outputs)}
    return nn.Linear(inputs, outputs), params, lambda p, x: x @ p["kernel"] + p["bias"]


def convolution(width: int) -> tuple[nn.Module, dict, Call]:
    class Temporal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(width, width, 3, padding=1)

        def forward(self, x):
            return self.conv(x.transpose(1, 2)).transpose(1, 2)

    def call(p, x):
        numbers = ("NWC", "WIO", "NWC")
        return (
            jax.lax.conv_general_dilated(x, p["conv"]["kernel"], (1,), [(1, 1)], dimension_numbers=numbers)
            + p["conv"]["bias"]
        )

    return Temporal(), {"conv": {"kernel": jnp.zeros((3, width, width)), "bias": jnp.zeros(width)}}, call


def layer(random: np.random.Generator, width: int) -> tuple[nn.Module, dict, Call]:
    kind = random.choice(["dense", "activation", "norm", "attention", "convolution", "residual", "rms"])
    if kind == "activation":
        name = str(random.choice(list(ACTIVATIONS)))
        return Activation(name), {}, lambda p, x: ACTIVATIONS[name][1](x)
    if kind == "norm":
        return nn.LayerNorm(width, eps=EPS), {"scale": jnp.ones(width), "bias": jnp.zeros(width)}, layer_norm
    if kind == "rms":
        call = lambda p, x: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + EPS) * p["scale"]  # noqa: E731
        return nn.RMSNorm(width, eps=EPS), {"scale": jnp.ones(width)}, call
    if kind == "attention":
        cut = {"kernel": jnp.zeros((width, 2, width // 2)), "bias": jnp.zeros((2, width // 2))}
        params = {name: dict(cut) for name in _QKV}
        params["out"] = {"kernel": jnp.zeros((2, width // 2, width)), "bias": jnp.zeros(width)}
        return Attention(width), {"attn": params}, lambda p, x: attention(p["attn"], x)
    if kind == "convolution":
        return convolution(width)
    if kind == "residual":
        module, params, call = layer(random, width)
        return Residual(module), {"body": params}, lambda p, x: x + call(p["body"], x)
    return dense(width, width)


def random_pair(seed: int) -> Pair:
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    width, outputs = int(random.choice([4, 6, 8])), int(random.integers(1, 5))
    stack = [layer(random, width) for _ in range(int(random.integers(1, 7)))] + [dense(width, outputs)]
    params = {f"layers_{i}": p for i, (_, p, _) in enumerate(stack) if p}
    squared = bool(random.integers(2))

    def torch_loss(model, batch):
        out = model(batch["x"])
        error = out - batch["y"]
        return (error**2).mean() if squared else nn.functional.smooth_l1_loss(out, batch["y"]), out

    def jax_loss(params, batch):
        x = batch["x"]
        for i, (_, p, call) in enumerate(stack):
            x = call(params[f"layers_{i}"] if p else {}, x)
        error = jnp.abs(x - batch["y"])
        return jnp.mean(error**2 if squared else jnp.where(error < 1, error**2 / 2, error - 0.5)), x

    rows, length = int(random.choice([2, 4, 8])), int(random.integers(2, 6))
    draw = lambda size: random.normal(size=(rows, length, size)).astype(np.float32)  # noqa: E731
    model = nn.Sequential(*(module for module, _, _ in stack))
    return Pair(TorchSide(model, torch_loss), JaxSide(params, jax_loss), [{"x": draw(width), "y": draw(outputs)}])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    began, wrong, closest = time.monotonic(), [], 0.0
    for seed in range(options.first, options.first + options.count):
        report = random_pair(seed).check(power=False)
        closest = max([closest, *(m.excess for f in report.findings for m in (f.measure, f.float64) if m)])
        if not report.ok:
            wrong.append(seed)
            print(f"seed {seed}:\n{report.explain()}", flush=True)
        jax.clear_caches()
    seconds = time.monotonic() - began
    print(f"{options.count} right pairs, {len(wrong)} called wrong; largest difference {closest:.2g} of its tolerance")
    print(f"{seconds:.0f} seconds")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
