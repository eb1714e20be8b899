"""The digits net in torch."""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from unified_ddp.equivalence.demo.data import BN_EPSILON, BN_MOMENTUM, BUFFERS, PARAMS


class DigitsNet(nn.Module):
    """Two convolutions with batch norm, two linear layers.

    Smooth on purpose (SiLU, average pooling): at a kink of ReLU or a tie of max pooling a difference of one ULP
    between frameworks flips a whole gradient element, which no tolerance tells from a wrong reduction.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8, eps=BN_EPSILON, momentum=BN_MOMENTUM)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(16, eps=BN_EPSILON, momentum=BN_MOMENTUM)
        self.fc1 = nn.Linear(256, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Maps images (batch, 1, 8, 8) to logits (batch, 10)."""
        hidden = functional.silu(self.bn1(self.conv1(images)))
        hidden = functional.silu(self.bn2(self.conv2(hidden)))
        hidden = functional.avg_pool2d(hidden, 2).flatten(1)
        return self.fc2(functional.silu(self.fc1(hidden)))


def make_model(weights: dict[str, np.ndarray], dtype: str) -> DigitsNet:
    """Returns the net with the given weights and fresh buffers."""
    model = DigitsNet().to(getattr(torch, dtype))
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == PARAMS
    assert {name: tuple(b.shape) for name, b in model.named_buffers()} == BUFFERS
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(torch.from_numpy(weights[name]))
    return model
