"""The digits net in flax, under torch's names, shapes and conventions.

The parameters stay a flat dict with torch's names and shapes, so that both frameworks have one schema and one plan.
They are brought into flax's layout inside the loss function, which autodiff turns back for the gradients.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from unified_ddp.equivalence.demo.data import BN_EPSILON, BN_MOMENTUM

Arrays = dict[str, jax.Array]


class DigitsNet(nn.Module):
    """The same net as torch_model.DigitsNet; images (batch, 8, 8, 1) to logits (batch, 10)."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Runs in training mode: batch norm takes the statistics of this batch."""
        hidden = images
        for i, width in ((1, 8), (2, 16)):
            hidden = nn.Conv(width, (3, 3), padding=1, use_bias=False, name=f"conv{i}")(hidden)
            # The fast variance, E[x^2] - E[x]^2, loses digits that torch keeps.
            norm = nn.BatchNorm(
                False, momentum=1 - BN_MOMENTUM, epsilon=BN_EPSILON, use_fast_variance=False, name=f"bn{i}"
            )
            hidden = nn.silu(norm(hidden))
        hidden = nn.avg_pool(hidden, (2, 2), (2, 2))
        hidden = hidden.transpose(0, 3, 1, 2).reshape(hidden.shape[0], -1)  # torch flattens channels first
        hidden = nn.silu(nn.Dense(32, name="fc1")(hidden))
        return nn.Dense(10, name="fc2")(hidden)


def loss_and_buffers(params: Arrays, buffers: Arrays, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, Arrays]:
    """Returns the mean cross entropy of a batch and the batch-norm buffers after it.

    Args:
        params: by torch's names, in torch's shapes.
        buffers: likewise.
        images: (batch, 1, 8, 8).
        labels: (batch,).
    """
    variables = {"params": _flax_params(params), "batch_stats": _flax_stats(buffers)}
    logits, updates = DigitsNet().apply(variables, images.transpose(0, 2, 3, 1), mutable=["batch_stats"])
    picked = jnp.take_along_axis(nn.log_softmax(logits), labels[:, None], axis=1)
    return -picked.mean(), _torch_buffers(buffers, updates["batch_stats"], images)


def _flax_params(params: Arrays) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in params.items():
        layer, kind = name.split(".")
        if kind == "bias":
            tree.setdefault(layer, {})["bias"] = value
        elif layer.startswith("bn"):
            tree.setdefault(layer, {})["scale"] = value
        else:
            # (out, in, height, width) to (height, width, in, out); (out, in) to (in, out)
            tree.setdefault(layer, {})["kernel"] = value.transpose(2, 3, 1, 0) if value.ndim == 4 else value.T
    return tree


def _flax_stats(buffers: Arrays) -> dict[str, Any]:
    return {
        layer: {"mean": buffers[f"{layer}.running_mean"], "var": buffers[f"{layer}.running_var"]}
        for layer in ("bn1", "bn2")
    }


def _torch_buffers(before: Arrays, stats: Any, images: jax.Array) -> Arrays:
    """Undoes flax's biased variance for torch's unbiased one; in front of both batch norms lie all 8x8 positions."""
    count = images.shape[0] * images.shape[2] * images.shape[3]
    after: Arrays = {}
    for layer in ("bn1", "bn2"):
        old = (1 - BN_MOMENTUM) * before[f"{layer}.running_var"]
        after[f"{layer}.running_mean"] = stats[layer]["mean"]
        after[f"{layer}.running_var"] = old + (stats[layer]["var"] - old) * (count / (count - 1))
        after[f"{layer}.num_batches_tracked"] = before[f"{layer}.num_batches_tracked"] + 1
    return after
