"""The torch side of the Keras pair."""

import os

os.environ["KERAS_BACKEND"] = "torch"

from typing import Any

import torch
from ports import keras_net
from torch import nn

from unified_ddp.equivalence import TorchSide


class Weights(nn.Module):
    """The weights of one layer."""

    def __init__(self, params: Any, buffers: Any) -> None:
        super().__init__()
        for key, value in params.items():
            self.register_parameter(key, nn.Parameter(torch.tensor(value)))
        for key, value in buffers.items():
            self.register_buffer(key, torch.tensor(value))


class Net(nn.ModuleDict):
    def __init__(self) -> None:
        net = keras_net.network("float32")
        params = keras_net.tree_of(net.trainable_variables)
        buffers = keras_net.tree_of(net.non_trainable_variables)
        super().__init__({layer: Weights(held, buffers.get(layer, {})) for layer, held in params.items()})

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        held = {layer: {**dict(part.named_parameters()), **dict(part.named_buffers())} for layer, part in self.items()}
        logits, new = keras_net.run(held, held, images, str(images.dtype).removeprefix("torch."))
        with torch.no_grad():
            for layer, values in new.items():
                for key, value in values.items():
                    self[layer].get_buffer(key).copy_(value)
        return logits


def loss(model: nn.Module, batch: Any) -> Any:
    logits = model(batch["images"])
    return nn.functional.cross_entropy(logits, batch["labels"]), logits


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=keras_net.LEARNING_RATE, momentum=0.9)


def make() -> Any:
    return TorchSide(Net(), loss, sgd), keras_net.batches()
