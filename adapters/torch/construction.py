"""What must be equal on all ranks before anything is broadcast, for `unified_ddp.ranks.construction` to compare."""

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from unified_ddp.torch.schema import dtype_name


def describe(module: nn.Module, ignored: Collection[str], options: dict[str, Any]) -> dict[str, Any]:
    """Returns what must be equal on all ranks, JSON-able: parameters and buffers in order, and options."""

    def tensors(named: Iterator[tuple[str, torch.Tensor]]) -> list[dict[str, Any]]:
        return [
            {
                "name": name,
                "shape": list(t.shape),
                "dtype": dtype_name(t.dtype),
                "strides": _strides(t),
                "trainable": t.requires_grad,
            }
            for name, t in named
            if name not in ignored
        ]

    return {
        "parameters": tensors(module.named_parameters()),
        "buffers": tensors(module.named_buffers()),
        "options": options,
    }


def _strides(tensor: torch.Tensor) -> list[int] | str:
    """Strides where they matter: along dimensions of more than one element."""
    if tensor.layout != torch.strided:
        return str(tensor.layout)
    return [stride for stride, extent in zip(tensor.stride(), tensor.shape, strict=True) if extent > 1]
