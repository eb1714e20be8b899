import jax.numpy as jnp
import optax
from torch import nn


def torch_classify(model, batch):
    logits = model(batch["x"])
    return nn.functional.cross_entropy(logits.flatten(0, -2), batch["y"].flatten()), logits


def jax_classify(model, batch):
    logits = model(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), logits


def jax_classify_sum(model, batch):
    logits = model(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).sum(), logits


def jax_classify_smoothed(model, batch):
    logits = model(batch["x"])
    labels = optax.smooth_labels(jnp.eye(logits.shape[-1])[batch["y"]], 0.1)
    return optax.softmax_cross_entropy(logits, labels).mean(), logits


def torch_regress(model, batch):
    out = model(batch["x"])
    return ((out - batch["y"]) ** 2).mean(), out


def jax_regress(model, batch):
    out = model(batch["x"])
    return jnp.mean((out - batch["y"]) ** 2), out
