"""What can be told at construction of tensors that no rank can send, or whose gradients cannot be reduced."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor

from unified_ddp.ranks.texts import shortened

_IGNORE = (
    "or put the names on the ignore list (DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, "
    "names))"
)


def _is_narrow(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and tensor.is_floating_point() and torch.finfo(tensor.dtype).bits < 16


_REFUSED: Sequence[tuple[Callable[[torch.Tensor], bool], str, str]] = (
    (
        lambda tensor: tensor.is_meta,
        "on the meta device, where they have no values",
        "Materialise the module first, as by module.to_empty(device=...) and its initialisation or load_state_dict,",
    ),
    (
        lambda tensor: isinstance(tensor, DTensor),
        "DTensors, of which each rank holds a part",
        "Give the slice of their mesh to average over as device_mesh= instead of process_group=,",
    ),
    (
        lambda tensor: tensor.is_quantized or tensor.layout is not torch.strided,
        "quantized or not dense, and cannot be sent",
        "Make them plain tensors (dequantize(), to_dense()); sparse gradients of dense parameters are fine;",
    ),
    (
        _is_narrow,
        "trained in less than 16 bits, in which gradients cannot be summed",
        "Train parameters of a wider dtype and cast where they are used, freeze them,",
    ),
)


def check_wrappable(named: Mapping[str, torch.Tensor]) -> None:
    """Refuses tensors that cannot be synchronised.

    Args:
        named: the module's parameters and buffers that are not ignored.

    Raises:
        ValueError: some are on the meta device, DTensors, not dense, or trained in too narrow a dtype; names them and
            says what to do.
    """
    for is_refused, what, remedy in _REFUSED:
        if names := [name for name, tensor in named.items() if is_refused(tensor)]:
            raise ValueError(f"parameters or buffers are {what}: {shortened(names)}. {remedy} {_IGNORE}")
