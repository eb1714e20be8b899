"""Subclasses that override what torch's class calls."""

from typing import Any

import torch
import torch.distributed as dist
from support.models import MLP, ConvNet
from support.oracle import check_step, oracle
from torch import nn

from faults.table import row


def squared(out: torch.Tensor) -> torch.Tensor:
    return out.pow(2).mean()


@row("_run_ddp_forward runs another method of the module", "that method's gradients")
def another_method(ddp_class: Any, rank: int, world_size: int) -> None:
    class TwoWays(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = MLP()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError("forward was called")

        def losses(self, x: torch.Tensor) -> torch.Tensor:
            return squared(self.net(x))

    class Wrapper(ddp_class):
        def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
            return self.module.losses(*inputs, **kwargs)

    ddp = Wrapper(TwoWays())
    for _ in range(3):
        x = torch.randn(5, 8)
        ddp.zero_grad()
        expected = oracle(ddp.module, lambda m, x=x: m.losses(x).backward())
        ddp(x).backward()
        for name, param in ddp.module.named_parameters():
            assert torch.allclose(param.grad.double(), expected[name], atol=1e-6), name


@row("_distributed_broadcast_coalesced sends buffers in another way", "called for every sync of buffers")
def other_broadcast(ddp_class: Any, rank: int, world_size: int) -> None:
    sent: list[int] = []

    class Wrapper(ddp_class):
        def _distributed_broadcast_coalesced(self, tensors: Any, buffer_size: int, authoritative_rank: int = 0) -> None:
            sent.append(len(tensors))
            for tensor in tensors:
                dist.broadcast(tensor, authoritative_rank)

    ddp = Wrapper(ConvNet())
    for _ in range(3):
        check_step(ddp, lambda m, x=torch.randn(5, 64): squared(m(x)).backward())
    assert sent == [len(list(ddp.module.buffers()))] * 3, f"tensors sent: {sent}"


@row("_build_params_for_reducer leaves a parameter out", "it stays local, the others are reduced")
def fewer_parameters(ddp_class: Any, rank: int, world_size: int) -> None:
    class Wrapper(ddp_class):
        def _build_params_for_reducer(self) -> tuple[list[Any], list[bool]]:
            params, sparse = super()._build_params_for_reducer()
            kept = [i for i, p in enumerate(params) if p is not self.module.head.bias]
            return [params[i] for i in kept], [sparse[i] for i in kept]

        def _build_debug_param_to_name_mapping(self, parameters: Any) -> dict[int, str]:
            return {}

    ddp = Wrapper(MLP())
    for _ in range(3):
        x = torch.randn(5, 8)
        ddp.zero_grad()
        expected = oracle(ddp.module, lambda m, x=x: (m(x) * (rank + 1)).sum().backward())
        (ddp(x) * (rank + 1)).sum().backward()
        for name, param in ddp.module.named_parameters():
            want = torch.full_like(param, 5.0 * (rank + 1)) if name == "head.bias" else expected[name].float()
            assert torch.allclose(param.grad, want, atol=1e-5), name
