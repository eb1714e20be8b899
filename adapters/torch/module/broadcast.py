"""The broadcast of parameters and buffers of any dtype and layout. Only bits travel, so no backend need know them."""

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import nn

_CARRIED = {torch.float32, torch.float64, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64}
"""Dtypes that every backend sends as they are; tensors of others are sent as bytes."""


def broadcast(group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], bucket_size: int, source: int) -> None:
    """Gives every rank the values of rank `source`, in place.

    Args:
        group: the ranks.
        tensors: dense, of the same shapes and dtypes on all ranks.
        bucket_size: most bytes to send at once.
        source: rank in the group.
    """
    with torch.no_grad():
        detached = [tensor.detach() for tensor in tensors]
        sent = [_as_sent(tensor) for tensor in detached]
        dist._broadcast_coalesced(group, sent, bucket_size, source)
        if group.rank() == source:
            return
        for tensor, received in zip(detached, sent, strict=True):
            if received.data_ptr() != tensor.data_ptr() and received.numel():
                values = received if received.dtype == tensor.dtype else received.view(tensor.dtype)
                compact(tensor).copy_(compact(values.view(tensor.shape), like=tensor))


def broadcast_module(
    group: dist.ProcessGroup,
    module: nn.Module,
    ignored: Collection[str],
    bucket_size: int,
    source: int,
    buffers: bool,
) -> None:
    """Gives every rank the parameters and, if `buffers`, buffers of rank `source`, save those named in `ignored`."""
    named = [*module.named_parameters(), *(module.named_buffers() if buffers else ())]
    broadcast(group, [tensor for name, tensor in named if name not in ignored], bucket_size, source)


def compact(tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """Returns a view without the repetitions of an expanded tensor.

    Args:
        tensor: cut down to one element along each dimension that repeats.
        like: repeats where this one, of the same shape, does; None means `tensor` itself.
    """
    for dim, stride in enumerate((tensor if like is None else like).stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _as_sent(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, or a copy that can be written to, or the bytes of either."""
    if tensor.dtype in _CARRIED and not tensor.is_neg():
        return tensor if tensor.is_contiguous() or compact(tensor) is tensor else tensor.contiguous()
    dense = plain(tensor)
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)  # one element may have any stride


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, or a copy, with each element in its place in memory: no lazy conjugate, negative or view."""
    return tensor.resolve_conj().resolve_neg().contiguous()
