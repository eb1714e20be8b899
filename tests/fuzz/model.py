"""The module that programs train, and what they do to it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

PARTS = "abcd"
WIDTH = 5


class OnPurpose(Exception):
    """Raised by programs, and caught by them."""


class Failing(torch.autograd.Function):
    """The identity, whose backward raises while the module says so."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: "Net") -> torch.Tensor:
        ctx.module = module
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.module.fails_backward:
            raise OnPurpose("in the backward")
        return grad, None


class Net(nn.Module):
    """A body, and parts of which each forward uses some."""

    def __init__(self, parts: str, buffers: bool) -> None:
        super().__init__()
        self.fails_backward = False
        self.body = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleDict({part: nn.Linear(WIDTH, 3) for part in parts})
        self.norm = nn.BatchNorm1d(WIDTH) if buffers else None
        if buffers:
            self.register_buffer("gain", torch.ones(()))
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(
        self, x: torch.Tensor, use: str, change: Callable[[nn.Module], None], fails: bool = False
    ) -> tuple[torch.Tensor, ...]:
        change(self)
        h = torch.tanh(run(self.body, x))
        if self.norm is not None:
            self.seen.add_(1)
            h = run(self.norm, h * self.gain)
        if fails:
            raise OnPurpose("in the forward")
        h = Failing.apply(h, self)
        used = [part for part in use if part in self.parts]
        return (h.mean(1), *(run(self.parts[part], h) for part in used))


def run(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x.to(layer.weight.dtype)).to(torch.float32)  # type: ignore[operator]


def loss(outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return sum((out.pow(2).mean() for out in outputs), torch.zeros(()))


def seeded(seed: int, make: Callable[[], Any]) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def change_module(module: Any, kind: str, part: str, seed: int) -> None:
    """Does one change; one that has nothing to be done to is left out. All ranks make the same new values."""
    if kind == "add":
        if part not in module.parts:
            module.parts[part] = seeded(seed, lambda: nn.Linear(WIDTH, 3))
        return
    layer = module.body if part == "body" else dict(module.parts.items()).get(part)
    if layer is None:
        return
    match kind:
        case "freeze" | "unfreeze":
            layer.requires_grad_(kind == "unfreeze")
        case "remove":
            if part != "body":
                del module.parts[part]
        case "replace":
            layer.weight = nn.Parameter(layer.weight.detach() * 0.5)
        case "new layer":
            fresh = seeded(seed, lambda: nn.Linear(layer.in_features, layer.out_features))
            if part == "body":
                module.body = fresh
            else:
                module.parts[part] = fresh
        case "cast":
            layer.to(torch.float64 if layer.weight.dtype == torch.float32 else torch.float32)
