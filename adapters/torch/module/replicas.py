"""The check that replicas are still equal: fingerprints of parameters and buffers, compared across ranks."""

import functools
import json
from collections.abc import Mapping

import torch

from unified_ddp.errors import ReplicaMismatchError
from unified_ddp.ranks.texts import tell_sides
from unified_ddp.torch.module.broadcast import plain
from unified_ddp.torch.reduction.transport import ProcessGroupTransport

_CHUNK = 1 << 16
"""Pieces hashed at once: their int64 copies stay in a CPU's cache."""

# Multipliers of splitmix64, as signed integers: torch has no unsigned multiplication on all devices.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = 0xBF58476D1CE4E5B9 - (1 << 64)


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a 64-bit hash of a tensor's bits, in order of its elements, as an int64 scalar on its device.

    Each 32-bit (or shorter) piece is multiplied by an odd number that depends on its place; the sum wraps around. Two
    tensors that differ in one piece never have the same hash, in more pieces hardly ever. Equal bits give equal hashes:
    NaN equals itself, 0.0 and -0.0 differ.
    """
    tensor = getattr(tensor.detach(), "_local_tensor", tensor.detach())  # of a DTensor
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    pieces = _pieces(tensor)
    places = _multipliers(_CHUNK, tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, pieces.numel(), _CHUNK):
        chunk = pieces[start : start + _CHUNK].to(torch.int64)
        total.mul_(_MIX).add_(chunk.mul_(places[: chunk.numel()]).sum())
    return total


@functools.lru_cache(maxsize=16)
def _multipliers(count: int, device: torch.device) -> torch.Tensor:
    """Pseudo-random odd numbers, one a place."""
    place = torch.arange(1, count + 1, dtype=torch.int64, device=device).mul_(_GOLDEN)
    return place.bitwise_xor_(place >> 29).mul_(_MIX).bitwise_or_(1)


def _pieces(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as flat integers of at most 32 bits."""
    tensor = plain(tensor)
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(-1)
    if not flat.numel():
        return flat.new_empty(0, dtype=torch.int32)
    width = {1: torch.uint8, 2: torch.int16}.get(flat.element_size(), torch.int32)
    return flat.view(width)


def are_equal(transport: ProcessGroupTransport, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Says, on every rank, whether tensors are equal on all ranks, bit by bit; 8 bytes a rank."""
    return _differing(transport, tensors) is None


def _differing(transport: ProcessGroupTransport, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Returns the tensors' hashes if these differ between ranks, else None."""
    if not tensors:
        return None
    hashes = torch.stack([h.to(transport.device) for h in map(fingerprint, tensors.values())])
    mine = fingerprint(hashes).item()
    return None if len(set(transport.all_gather_ints(int(mine) & (1 << 64) - 1))) == 1 else hashes


def check_replicas(
    transport: ProcessGroupTransport, tensors: Mapping[str, torch.Tensor], kind: str = "parameter"
) -> None:
    """Compares tensors, equal in number and names on all ranks: 8 bytes a rank, and 8 a tensor only if they differ.

    Raises:
        ReplicaMismatchError: on every rank, naming the first tensor that differs and the ranks on each side.
    """
    hashes = _differing(transport, tensors)
    if hashes is None:
        return
    ranks = [json.loads(text) for text in transport.all_gather_text(json.dumps(hashes.tolist()))]
    if counts := tell_sides([f"{len(r)} {kind}s" for r in ranks]):
        raise ReplicaMismatchError(
            f"the replicas are no longer equal: there are {counts}. Change modules alike on all ranks"
        )
    raise ReplicaMismatchError(_difference(list(tensors), ranks, kind))


def _difference(names: list[str], ranks: list[list[int]], kind: str) -> str:
    differing = [i for i in range(len(names)) if len({r[i] for r in ranks}) > 1]
    first = differing[0]
    sides = tell_sides([f"{r[first] & (1 << 64) - 1:016x}" for r in ranks])
    return (
        f"the replicas are no longer equal: {kind} {names[first]!r} differs between ranks, its fingerprint is "
        f"{sides}; {len(differing)} of {len(names)} {kind}s differ. Something changed it on some ranks only: an "
        "optimizer step on gradients that were not reduced, other optimizer state, or code that runs on one rank. Load "
        "the same state on all ranks"
    )
