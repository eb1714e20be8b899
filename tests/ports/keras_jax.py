"""The JAX side of the Keras pair."""

import os

os.environ["KERAS_BACKEND"] = "jax"

from typing import Any

import optax
from ports import keras_net

from unified_ddp.equivalence import JaxSide


def loss(params: Any, batch: Any, buffers: Any) -> Any:
    logits, new = keras_net.run(params, buffers, batch["images"], str(batch["images"].dtype))
    value = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()
    return value, new, logits


def make() -> Any:
    net = keras_net.network("float32")
    params = keras_net.tree_of(net.trainable_variables)
    buffers = keras_net.tree_of(net.non_trainable_variables)
    return JaxSide(params, loss, optax.sgd(keras_net.LEARNING_RATE, momentum=0.9), buffers=buffers)
