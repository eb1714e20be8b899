"""The sync of buffers before a forward, without a harm to backward passes that still need their old values."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn


def broadcast_buffers(
    group: dist.ProcessGroup, module: nn.Module, buffers: Sequence[torch.Tensor], bucket_size: int, source: int
) -> None:
    """Gives every rank the buffers of rank `source`.

    A buffer that a graph saved for its backward pass keeps its value in that graph: the module gets a new tensor in its
    place. All others are written in place.

    Args:
        group: the ranks.
        module: the owner of the buffers.
        buffers: in the same order on all ranks.
        bucket_size: most bytes to broadcast at once.
        source: rank in the group.
    """
    # On the source, too: a broadcast counts as a change in place there, which its graphs would refuse.
    saved = {b: b.clone() for b in buffers if _is_saved(b)}
    dist._broadcast_coalesced(group, [saved.get(b, b) for b in buffers], bucket_size, source)
    changed = {old: new for old, new in saved.items() if not _same_bits(old, new)}
    if changed:
        for owner in module.modules():
            for name, held in owner._buffers.items():
                if held in changed:
                    owner._buffers[name] = changed[held]


def _is_saved(buffer: torch.Tensor) -> bool:
    """Says whether something beside Python's own reference holds the tensor: a graph that saved it, or a view."""
    count = getattr(buffer, "_use_count", None)
    return count is not None and count() > 1


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
