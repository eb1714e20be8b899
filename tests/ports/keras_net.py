"""One Keras 3 network and its weights as trees, for the backend that KERAS_BACKEND names."""

from typing import Any

import keras
import numpy as np

SIZE, CLASSES, LEARNING_RATE = 6, 4, 1e-2
_BUILT: dict[str, keras.Model] = {}


def network(dtype: str) -> keras.Model:
    """Keras layers compute in the dtype of their policy: one network for each."""
    if dtype not in _BUILT:
        layers = keras.layers
        keras.utils.set_random_seed(0)
        _BUILT[dtype] = keras.Sequential(
            [
                layers.Input((SIZE, SIZE, 3), dtype=dtype),
                layers.Conv2D(6, 3, strides=2, padding="same", name="conv", dtype=dtype),
                layers.BatchNormalization(name="norm", dtype=dtype),
                layers.Activation("gelu", dtype=dtype),
                layers.DepthwiseConv2D(3, padding="same", name="depthwise", dtype=dtype),
                layers.GlobalAveragePooling2D(dtype=dtype),
                layers.LayerNormalization(name="scale", dtype=dtype),
                layers.Dense(CLASSES, name="head", dtype=dtype),
            ]
        )
    return _BUILT[dtype]


def names(variables: Any) -> list[tuple[str, str]]:
    """Returns layer and key of each variable, such as ("conv", "kernel")."""
    parts = [variable.path.split("/") for variable in variables]
    return [(layer, key) for *_, layer, key in parts]


def tree_of(variables: Any) -> dict[str, dict[str, np.ndarray]]:
    """Returns values by layer and key."""
    tree: dict[str, dict[str, np.ndarray]] = {}
    for (layer, key), variable in zip(names(variables), variables, strict=True):
        tree.setdefault(layer, {})[key] = keras.ops.convert_to_numpy(variable.value)
    return tree


def run(params: Any, buffers: Any, images: Any, dtype: str) -> tuple[Any, Any]:
    """Returns logits and the new buffers, as a tree, of a call in training mode."""
    net = network(dtype)
    trained, others = names(net.trainable_variables), names(net.non_trainable_variables)
    logits, new = net.stateless_call(
        [params[layer][key] for layer, key in trained],
        [buffers[layer][key] for layer, key in others],
        images,
        training=True,
    )
    tree: dict[str, dict[str, Any]] = {}
    for (layer, key), value in zip(others, new, strict=True):
        tree.setdefault(layer, {})[key] = value
    return logits, tree


def batches() -> list[Any]:
    random = np.random.default_rng(0)
    images = random.normal(size=(4, SIZE, SIZE, 3)).astype(np.float32)
    return [{"images": images, "labels": random.integers(0, CLASSES, 4)}]
