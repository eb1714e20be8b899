"""Small modules that between them hold what a reducer meets."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class MLP(nn.Module):
    def __init__(self, width: int = 40, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8 if i == 0 else width, width) for i in range(depth))
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


class ConvNet(nn.Module):
    def __init__(self, channels_last: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3, padding=1)
        self.bn = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 4, 3, bias=False)
        self.head = nn.Linear(4 * 6 * 6, 4)
        if channels_last:
            self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(-1, 1, 8, 8)
        return self.head(self.conv2(torch.relu(self.bn(self.conv1(x)))).flatten(1))


class TwoHeads(nn.Module):
    """Returns both heads' outputs, or those asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.left = nn.Linear(16, 4)
        self.right = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, heads: str = "lr") -> dict[str, torch.Tensor]:
        h = torch.tanh(self.body(x))
        return {k: {"l": self.left, "r": self.right}[k](h) for k in heads}


class Mixed(nn.Module):
    """float32, float64, bfloat16 and complex64 parameters, interleaved."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8, dtype=torch.float64)
        self.c = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.d = nn.Parameter(torch.randn(8, 3))
        self.e = nn.Parameter(torch.randn((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.b(torch.tanh(self.a(x)).double()).float()
        return (y * (self.c * self.c.conj() + self.c).real) @ self.d * self.e.float()


class TiedEmbedding(nn.Module):
    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8, sparse=sparse)
        self.mix = nn.Linear(8, 8)
        if not sparse:
            self.out = nn.Linear(8, 20, bias=False)
            self.out.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.mix(self.embedding(tokens)))
        return self.out(h) if hasattr(self, "out") else h


class Checkpointed(nn.Module):
    """One layer under two checkpoints, and one outside."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.outer = nn.Linear(8, 8)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.outer(x)
        x = checkpoint(lambda y: torch.tanh(self.inner(y)), x, use_reentrant=self.reentrant)
        return checkpoint(lambda y: torch.sin(self.inner(y)), x, use_reentrant=self.reentrant)
