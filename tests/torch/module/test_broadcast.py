"""State of any dtype and layout is rank 0's after construction, and after each forward."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from unified_ddp.torch import DistributedDataParallel

INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.int64]
FLOATS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float64, torch.complex64]


class Stateful(nn.Module):
    def __init__(self, value: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        for dtype in (*INTEGERS, *FLOATS):
            name = "of_" + str(dtype).removeprefix("torch.")
            full = torch.full((3, 2), value, dtype=torch.float32).to(dtype)
            self.register_buffer(name, full)
            self.register_buffer(f"{name}_scalar", full[0, 0].clone())
            self.register_buffer(f"{name}_transposed", full.clone().t())
            self.register_buffer(f"{name}_expanded", full[:1, :1].clone().expand(4, 3))
            self.register_buffer(f"{name}_empty", full[:0].clone())
        self.frozen = nn.Parameter(torch.full((2, 2), float(value)).to(torch.float8_e4m3fn), requires_grad=False)
        self.levels = nn.Parameter(torch.full((5,), value, dtype=torch.uint16), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def values(module: nn.Module) -> set[complex]:
    found = set()
    for name, tensor in module.state_dict().items():
        if not name.startswith("linear"):
            found |= {complex(v) for v in tensor.to(torch.complex64).flatten().tolist()}
    return found


def case_any_dtype(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(Stateful(1 - rank))
    assert values(ddp.module) == {1}
    strides = {name: b.stride() for name, b in Stateful(0).named_buffers()}
    for name, buffer in ddp.module.named_buffers():
        assert buffer.stride() == strides[name], name
    if rank == 1:
        for name, other in Stateful(0).named_buffers():
            setattr(ddp.module, name, other)
    assert values(ddp.module) == ({1} if rank == 0 else {0, 1})  # frozen parameters stay
    ddp(torch.randn(3, 2)).sum().backward()
    assert values(ddp.module) == {1}


def test_state_of_any_dtype(world: Callable[[int], Any]) -> None:
    world(2).run(case_any_dtype)
