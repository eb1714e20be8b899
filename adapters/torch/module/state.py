"""Sending a rank's parameters and buffers to all others, whatever their dtypes: only bits travel."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

_CARRIED = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.int8, torch.uint8, torch.int32, torch.int64),
}
"""What every backend broadcasts as it is; the rest (bool, float8, uint16, ...) goes as bytes."""


def broadcast_tensors(group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], bucket_size: int, source: int) -> None:
    """Overwrites tensors by those of rank `source`.

    Args:
        group: the ranks.
        tensors: strided, of the same shapes, dtypes and strides on all ranks; expanded ones are sent once.
        bucket_size: most bytes to broadcast at once.
        source: rank in the group.
    """
    once = [_without_repeats(t.detach()) for t in tensors]
    sent = [t if t.dtype in _CARRIED else _as_bytes(t) for t in once]
    if sent:
        dist._broadcast_coalesced(group, sent, bucket_size, source)
    for tensor, received in zip(once, sent, strict=True):
        if received is not tensor and received.data_ptr() != tensor.data_ptr():
            tensor.copy_(received.view(tensor.dtype).view(tensor.shape))


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """The part of an expanded tensor that is in memory: nothing can be written to its repetitions."""
    repeated = [dim for dim, stride in enumerate(tensor.stride()) if stride == 0 and tensor.shape[dim] > 1]
    for dim in reversed(repeated):
        tensor = tensor.select(dim, 0)
    return tensor


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
