"""The models of `benchmarks/jax_step.py`: parameters, a loss over one batch, and that batch, without a framework."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

__all__ = ["MODELS", "Model"]


@dataclasses.dataclass(frozen=True)
class Model:
    """`batch` has the examples of one replica."""

    params: Any
    loss_fn: Callable[[Any, Any], jax.Array]
    batch: Any


class Init:
    """Draws params on the host, as numpy arrays."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)

    def normal(self, *shape: int, fan_in: int | None = None) -> np.ndarray:
        scale = (fan_in or shape[0]) ** -0.5
        return (scale * self._random.normal(size=shape)).astype(np.float32)

    def ints(self, high: int, *shape: int) -> np.ndarray:
        return self._random.integers(0, high, size=shape, dtype=np.int32)


def mlp(layers: int = 100, width: int = 64, examples: int = 16) -> Model:
    """200 leaves, 0.4 million parameters."""
    init = Init()
    params = [{"w": init.normal(width, width), "b": np.zeros(width, np.float32)} for _ in range(layers)]

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        for layer in params:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return jnp.mean(x**2)

    return Model(params, loss_fn, init.normal(examples, width))


def transformer(
    layers: int = 12, width: int = 256, heads: int = 4, words: int = 4096, length: int = 64, examples: int = 2
) -> Model:
    """A decoder with tied embeddings: 122 leaves, 10.5 million parameters."""
    init = Init()

    def block() -> dict[str, np.ndarray]:
        return {
            "norm1": np.ones(width, np.float32),
            "norm2": np.ones(width, np.float32),
            "q": init.normal(width, width),
            "k": init.normal(width, width),
            "v": init.normal(width, width),
            "o": init.normal(width, width),
            "up": init.normal(width, 4 * width),
            "up_bias": np.zeros(4 * width, np.float32),
            "down": init.normal(4 * width, width),
            "down_bias": np.zeros(width, np.float32),
        }

    params = {
        "embed": init.normal(words, width, fan_in=width),
        "place": init.normal(length, width, fan_in=width),
        "blocks": [block() for _ in range(layers)],
    }

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x * lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale

    def attend(p: Any, x: jax.Array) -> jax.Array:
        q, k, v = (
            (x @ p[name]).reshape(*x.shape[:2], heads, width // heads).transpose(0, 2, 1, 3) for name in ("q", "k", "v")
        )
        scores = q @ k.transpose(0, 1, 3, 2) * (width // heads) ** -0.5
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
        mixed = jax.nn.softmax(scores, axis=-1) @ v
        return mixed.transpose(0, 2, 1, 3).reshape(x.shape) @ p["o"]

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["embed"][tokens[:, :-1]] + params["place"]
        for p in params["blocks"]:
            x = x + attend(p, norm(x, p["norm1"]))
            x = x + jax.nn.gelu(norm(x, p["norm2"]) @ p["up"] + p["up_bias"]) @ p["down"] + p["down_bias"]
        scores = jax.nn.log_softmax(x @ params["embed"].T)
        return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1))

    return Model(params, loss_fn, init.ints(words, examples, length + 1))


def resnet(widths: tuple[int, ...] = (32, 64, 128, 256), examples: int = 8, size: int = 32) -> Model:
    """ResNet-18 of half width for small images, with local batch statistics: 62 leaves, 2.8 million parameters."""
    init = Init()

    def kernel(extent: int, into: int, out: int) -> np.ndarray:
        return init.normal(extent, extent, into, out, fan_in=extent * extent * into)

    def scale(width: int) -> dict[str, np.ndarray]:
        return {"scale": np.ones(width, np.float32), "bias": np.zeros(width, np.float32)}

    def block(into: int, out: int) -> dict[str, Any]:
        params = {"conv1": kernel(3, into, out), "norm1": scale(out), "conv2": kernel(3, out, out), "norm2": scale(out)}
        return params | ({"conv": kernel(1, into, out), "norm": scale(out)} if into != out else {})

    pairs = [pair for a, b in zip(widths[:1] + widths, widths, strict=False) for pair in ((a, b), (b, b))]
    params = {
        "conv": kernel(3, 3, widths[0]),
        "norm": scale(widths[0]),
        "blocks": [block(*pair) for pair in pairs],
        "head": init.normal(widths[-1], 10),
        "head_bias": np.zeros(10, np.float32),
    }

    def conv(x: jax.Array, w: jax.Array, stride: int = 1) -> jax.Array:
        return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def norm(x: jax.Array, p: Any) -> jax.Array:
        mean, var = jnp.mean(x, axis=(0, 1, 2)), jnp.var(x, axis=(0, 1, 2))
        return (x - mean) * lax.rsqrt(var + 1e-5) * p["scale"] + p["bias"]

    def residual(p: Any, x: jax.Array) -> jax.Array:
        stride = 2 if "conv" in p else 1
        y = jax.nn.relu(norm(conv(x, p["conv1"], stride), p["norm1"]))
        y = norm(conv(y, p["conv2"]), p["norm2"])
        return jax.nn.relu(y + (norm(conv(x, p["conv"], stride), p["norm"]) if "conv" in p else x))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x = jax.nn.relu(norm(conv(batch["image"], params["conv"]), params["norm"]))
        for p in params["blocks"]:
            x = residual(p, x)
        scores = jax.nn.log_softmax(jnp.mean(x, axis=(1, 2)) @ params["head"] + params["head_bias"])
        return -jnp.mean(jnp.take_along_axis(scores, batch["label"][:, None], axis=-1))

    batch = {"image": init.normal(examples, size, size, 3, fan_in=1), "label": init.ints(10, examples)}
    return Model(params, loss_fn, batch)


MODELS: dict[str, Callable[[], Model]] = {"mlp": mlp, "transformer": transformer, "resnet": resnet}
