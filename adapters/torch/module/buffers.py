"""The sync of buffers before a forward, without a harm to backward passes that still need their old values."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from unified_ddp.torch.module.broadcast import compact, plain


def broadcast_buffers(
    module: nn.Module, buffers: Sequence[torch.Tensor], send: Callable[[list[torch.Tensor]], None]
) -> None:
    """Gives every rank the buffers of one.

    A buffer that a graph saved for its backward pass keeps its value in that graph: the module gets a new tensor in its
    place. All others are written in place.

    Args:
        module: the owner of the buffers.
        buffers: in the same order on all ranks.
        send: broadcasts tensors in place.
    """
    # On the source, too: a broadcast counts as a change in place there, which its graphs would refuse.
    saved = {b: _clone(b) for b in buffers if _is_saved(b)}
    send([saved.get(b, b) for b in buffers])
    changed = {old: new for old, new in saved.items() if not _same_bits(old, new)}
    if changed:
        for owner in module.modules():
            for name, held in owner._buffers.items():
                if held in changed:
                    owner._buffers[name] = changed[held]


def _clone(buffer: torch.Tensor) -> torch.Tensor:
    """Returns a copy that repeats where the buffer does."""
    one = compact(buffer)
    return one.clone() if one is buffer else one.clone().expand(buffer.shape)


def _is_saved(buffer: torch.Tensor) -> bool:
    """Says whether something beside Python's own reference holds the tensor: a graph that saved it, or a view."""
    count = getattr(buffer, "_use_count", None)
    return count is not None and count() > 1


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(_bits(a), _bits(b))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return plain(tensor).view(-1).view(torch.uint8)
