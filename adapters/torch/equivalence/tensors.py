"""A module's parameters and saved buffers, described and exchanged as numpy arrays."""

import re
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor, nn

from unified_ddp.equivalence.side import Arrays, TensorInfo
from unified_ddp.torch.schema import dtype_name

_COMPLEX = {"float64": torch.complex128}


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Returns parameters and saved floating-point buffers by name, tied ones once."""
    saved = set(module.state_dict(keep_vars=True))
    found: dict[str, Tensor] = dict(module.named_parameters())
    for name, buffer in module.named_buffers():
        if name in saved and (buffer.is_floating_point() or buffer.is_complex()):
            found[name] = buffer
    return found


def describe(module: nn.Module) -> tuple[TensorInfo, ...]:
    """Returns what `Side.tensors` returns."""
    holders: dict[int, list[tuple[str, str, nn.Module, Tensor]]] = {}
    wanted = {id(tensor) for tensor in tensors_of(module).values()}
    for path, owner in module.named_modules():
        held = [*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)]
        for key, tensor in held:
            if id(tensor) in wanted:
                holders.setdefault(id(tensor), []).append((path, key, owner, tensor))
    infos = []
    for places in holders.values():
        main, *aliases = [_info(*place) for place in places]
        infos.append(TensorInfo(**{**vars(main), "aliases": tuple(aliases)}))
    return tuple(infos)


def _info(path: str, key: str, owner: nn.Module, tensor: Tensor) -> TensorInfo:
    return TensorInfo(
        name=f"{path}.{key}" if path else key,
        shape=tuple(tensor.shape),
        dtype=dtype_name(tensor.dtype),
        buffer=not isinstance(tensor, nn.Parameter),
        owner=path,
        owner_type=_type_name(owner),
        key=key,
        options={k: v for k, v in vars(owner).items() if isinstance(v, bool | int | float | str) and k[0] != "_"},
    )


def _type_name(module: nn.Module) -> str:
    """The nearest type of torch's own in the method resolution order: a subclass of Linear lies as Linear does."""
    for base in type(module).__mro__:
        if base.__module__.startswith("torch.nn.modules.") and not re.search(r"\.(module|container)$", base.__module__):
            return f"{base.__module__}.{base.__qualname__}"
    return f"{type(module).__module__}.{type(module).__qualname__}"


def torch_dtype(dtype: str, tensor: Tensor) -> torch.dtype:
    """Returns the dtype that a tensor takes in a run of a real dtype: complex ones take the complex one."""
    if tensor.is_complex():
        return _COMPLEX.get(dtype, torch.complex64)
    return getattr(torch, dtype) if tensor.is_floating_point() else tensor.dtype


def cast_module(module: nn.Module, dtype: str) -> nn.Module:
    """Casts parameters and buffers in place; `Module.to` would make complex ones real."""
    return module._apply(lambda tensor: tensor.to(torch_dtype(dtype, tensor)))


def load(module: nn.Module, values: Arrays) -> None:
    """Gives the module these values; names that are not in `values` stay as they are."""
    with torch.no_grad():
        for name, tensor in tensors_of(module).items():
            if name in values:
                tensor.copy_(from_numpy(values[name]).to(tensor.device))


def to_numpy(tensor: Tensor) -> np.ndarray:
    """Returns a copy; bfloat16 as ml_dtypes'."""
    host = tensor.detach().to("cpu").resolve_conj().contiguous()
    if host.dtype is torch.bfloat16:
        return host.view(torch.int16).numpy().copy().view(ml_dtypes.bfloat16)
    return host.numpy().copy()


def from_numpy(array: Any) -> Tensor:
    """Returns a tensor that shares no memory with `array`."""
    array = np.array(array)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
