"""Modules in the words of the core: parameter schemas by name."""

from collections.abc import Collection, Iterable

import torch
from torch import nn

from unified_ddp.plan import ParamSpec
from unified_ddp.ranks.construction import any_spec


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the canonical numpy or ml_dtypes name of a torch dtype."""
    return str(dtype).removeprefix("torch.")


def param_spec(name: str, tensor: torch.Tensor, *, sparse: bool = False) -> ParamSpec:
    """Returns the schema of a parameter or buffer."""
    return ParamSpec(
        name,
        list(tensor.shape),
        dtype_name(tensor.dtype),
        strides=list(tensor.stride()),
        device=str(tensor.device),
        trainable=tensor.requires_grad,
        sparse=sparse,
    )


def compared_specs(named: Iterable[tuple[str, torch.Tensor]], ignored: Collection[str]) -> list[ParamSpec]:
    """Returns what ranks compare of parameters or buffers, which may be of any dtype and layout."""
    return [
        any_spec(name, list(t.shape), dtype_name(t.dtype), strides=t.stride(), trainable=t.requires_grad)
        if t.layout == torch.strided
        else any_spec(f"{name} ({t.layout})", list(t.shape), dtype_name(t.dtype), trainable=t.requires_grad)
        for name, t in named
        if name not in ignored
    ]


def reduced_parameters(module: nn.Module, ignored: Collection[str]) -> dict[str, tuple[nn.Parameter, bool]]:
    """Returns the parameters to reduce by name, in registration order, shared ones once.

    Args:
        module: the wrapped module.
        ignored: names of parameters that are not reduced.

    Returns:
        For each name the parameter and whether its owner says that its gradient is sparse.
    """
    found: dict[str, tuple[nn.Parameter, bool]] = {}
    seen: set[nn.Parameter] = set()
    for prefix, owner in module.named_modules():
        sparse = isinstance(owner, nn.Embedding | nn.EmbeddingBag) and owner.sparse
        for short, param in owner.named_parameters(recurse=False):
            name = f"{prefix}.{short}" if prefix else short
            # torch's own spelling of a root module's parameter has a leading dot; both may be given to be ignored
            if not param.requires_grad or param in seen or name in ignored or f"{prefix}.{short}" in ignored:
                continue
            seen.add(param)
            found[name] = (param, sparse)
    return found
