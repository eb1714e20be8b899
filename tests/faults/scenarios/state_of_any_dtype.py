"""Buffers and frozen parameters that a backend cannot carry by their dtype or layout."""

from typing import Any

import torch
import torch.distributed as dist
from support.oracle import check_step
from torch import nn

from faults.table import row

DTYPES = [
    "bfloat16",
    "bool",
    "int16",
    "uint16",
    "uint32",
    "uint64",
    "complex32",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
]


def made_of(dtype: str, shape: tuple[int, ...], value: int) -> torch.Tensor:
    """A tensor whose bytes depend on the value."""
    like = torch.empty(shape, dtype=getattr(torch, dtype))
    held = torch.full((like.nbytes,), value % 2 if dtype == "bool" else value, dtype=torch.uint8)
    return held.view(like.dtype).view(shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def assert_same_everywhere(module: nn.Module) -> None:
    for name, tensor in [*module.named_buffers(), *module.named_parameters()]:
        if not tensor.requires_grad:
            mine = bits(tensor)
            every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(every, mine)
            assert all(torch.equal(every[0], other) for other in every), f"{name} is not rank 0's"


class Holding(nn.Module):
    def __init__(self, buffers: list[torch.Tensor], frozen: list[torch.Tensor] = ()) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        for i, buffer in enumerate(buffers):
            self.register_buffer(f"buffer{i}", buffer)
        self.frozen = nn.ParameterList(nn.Parameter(t, requires_grad=False) for t in frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).pow(2).mean()


@row("buffers and frozen parameters over gloo", "rank 0's, bit by bit", variants=[{"dtype": d} for d in DTYPES])
def dtypes(ddp_class: Any, rank: int, world_size: int, dtype: str) -> None:
    shapes = ((), (3,), (0, 4), (2, 5))
    ddp = ddp_class(Holding(*([made_of(dtype, s, 1 + rank) for s in shapes] for _ in range(2))))
    assert_same_everywhere(ddp.module)
    for step in range(3):
        ddp.module.buffer1 = made_of(dtype, (3,), 10 + step + rank)
        ddp.module.buffer3.copy_(made_of(dtype, (2, 5), 20 + step + rank))
        check_step(ddp, lambda m, x=torch.randn(5, 8): m(x).backward())
        assert_same_everywhere(ddp.module)
    assert torch.equal(bits(ddp.module.buffer1), bits(made_of(dtype, (3,), 12))), "not rank 0's"


LAYOUTS = {
    "expanded": lambda v: torch.full((1,), v).expand(4),
    "expanded in part": lambda v: torch.arange(3.0).add(v)[:, None].expand(3, 4),
    "expanded, of bytes": lambda v: torch.tensor(v).to(torch.float8_e5m2).expand(4),
    "transposed": lambda v: torch.arange(6.0).add(v).view(2, 3).t(),
    "with holes": lambda v: torch.arange(8.0).add(v)[::2],
    "a lazy conjugate": lambda v: torch.full((3,), complex(v, 2 * v)).conj(),
    "a lazy negative": lambda v: torch._neg_view(torch.full((3,), v)),
}


@row("a buffer and a frozen parameter that are", "rank 0's", variants=[{"layout": layout} for layout in LAYOUTS])
def layouts(ddp_class: Any, rank: int, world_size: int, layout: str) -> None:
    make = LAYOUTS[layout]
    ddp = ddp_class(Holding([make(1.0 + rank)], [make(3.0 + rank)]))
    assert_same_everywhere(ddp.module)
    for step in range(3):
        ddp.module.buffer0 = make(5.0 + step + rank)
        check_step(ddp, lambda m, x=torch.randn(5, 8): m(x).backward())
        assert_same_everywhere(ddp.module)
    assert torch.equal(bits(ddp.module.buffer0), bits(make(7.0))), "not rank 0's"


@row("an expanded buffer that a graph saved, synced before its backward pass", "the value saved counts")
def saved(ddp_class: Any, rank: int, world_size: int) -> None:
    class Scaled(Holding):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * self.buffer0

    ddp = ddp_class(Scaled([torch.ones(1).expand(8)]))
    for value in (2.0, 5.0):
        ddp.module.buffer0 = torch.full((1,), value).expand(8)
        x = torch.randn(5, 8)
        ddp.zero_grad()
        out = ddp(x)
        expected = torch.autograd.grad((ddp.module.layer(x) * value).sum(), ddp.module.layer.weight)[0]
        if rank == 0:
            ddp.module.buffer0 = torch.full((1,), 2 * value).expand(8)
        ddp(x)
        out.sum().backward()
        dist.all_reduce(expected)
        assert torch.allclose(ddp.module.layer.weight.grad, expected / world_size, atol=1e-5), (
            "another value's gradient"
        )
