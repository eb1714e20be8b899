"""A small torch model as the first side of a pair, with what may be wrong with it."""

import os
import time

import numpy as np
import torch
from torch import nn

from unified_ddp.equivalence import TorchSide


class Net(nn.Module):
    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.dense1 = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8, eps=eps)
        self.dense2 = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense2(torch.relu(self.norm(self.dense1(x))))


def loss(model, batch):
    logits = model(batch["x"])
    return nn.functional.cross_entropy(logits, batch["y"]), {"logits": logits}


def batches(count=2):
    random = np.random.default_rng(0)
    return [
        {"x": random.standard_normal((8, 6)).astype("float32"), "y": random.integers(0, 3, 8)} for _ in range(count)
    ]


def make():
    print("the torch side is made")
    return TorchSide(Net(), loss, lambda m: torch.optim.SGD(m.parameters(), 0.1)), batches()


def make_wrong():
    return TorchSide(Net(), lambda m, b: (3 * loss(m, b)[0], loss(m, b)[1])), batches()


def make_alone():
    return TorchSide(Net(), loss)


def make_with_generator():
    return TorchSide(Net(), loss), (batch for batch in batches())


def make_nothing():
    return None


def make_that_raises():
    raise KeyError("no such checkpoint")


def make_that_dies():
    os._exit(7)


def make_with_failing_loss():
    def failing(model, batch):
        raise ZeroDivisionError("no tokens in this batch")

    return TorchSide(Net(), failing), batches()


def make_that_dies_later():
    def dying(model, batch):
        os._exit(9)

    return TorchSide(Net(), dying), batches()


def make_that_hangs():
    def hanging(model, batch):
        time.sleep(600)

    return TorchSide(Net(), hanging), batches()
