"""The check before anything is broadcast: all ranks were constructed alike, or every rank says where they differ."""

import hashlib
import json
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from unified_ddp.errors import ConstructionMismatchError
from unified_ddp.torch.ranks import sides_by_rank, tell
from unified_ddp.torch.schema import dtype_name
from unified_ddp.transport import Transport

__all__ = ["check_construction", "describe"]


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


def check_construction(transport: Transport, description: dict[str, Any]) -> None:
    """Compares the ranks' descriptions: 16 bytes a rank if they agree, the whole only if they do not.

    Raises:
        ConstructionMismatchError: on every rank, naming the first difference and the ranks on each side.
    """
    text = json.dumps(description, sort_keys=True)
    fingerprint = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    if len(set(transport.all_gather_ints(fingerprint))) == 1:
        return
    raise ConstructionMismatchError(first_difference([json.loads(t) for t in transport.all_gather_text(text)]))


def _strides(tensor: torch.Tensor) -> list[int] | str:
    """Strides where they matter: along dimensions of more than one element."""
    if tensor.layout != torch.strided:
        return str(tensor.layout)
    return [stride for stride, extent in zip(tensor.stride(), tensor.shape, strict=True) if extent > 1]


def first_difference(ranks: list[dict[str, Any]]) -> str:
    """Returns the message for descriptions, by rank, that are not all equal."""
    for kind in ("parameters", "buffers"):
        found = _difference_in_tensors(kind, [r[kind] for r in ranks])
        if found:
            return found
    for name in sorted({name for r in ranks for name in r["options"]}):
        sides = sides_by_rank([r["options"].get(name) for r in ranks], repr)
        if len(sides) > 1:
            return (
                f"ranks were constructed with different options: {name} is {tell(sides)}. Pass the same on every rank."
            )
    raise AssertionError("the descriptions are equal")


def _difference_in_tensors(kind: str, ranks: list[list[dict[str, Any]]]) -> str | None:
    one = kind.removesuffix("s")
    remedy = "Build the same model on every rank; nothing was broadcast."
    for position in range(max(map(len, ranks))):
        here = [r[position] if position < len(r) else None for r in ranks]
        sides = sides_by_rank(here, lambda t: "absent" if t is None else f"{t['name']!r}")
        if len(sides) > 1:
            counts = sides_by_rank(ranks, lambda r: f"{len(r)} {kind}")
            count = f" The ranks have {tell(counts)}." if len(counts) > 1 else ""
            return f"ranks hold different {kind}: {one} number {position} is {tell(sides)}.{count} {remedy}"
        name = next(t["name"] for t in here if t is not None)
        for field in ("shape", "dtype", "strides", "trainable"):
            sides = sides_by_rank(here, lambda t, field=field: f"{t[field]}")  # type: ignore[misc]
            if len(sides) > 1:
                return f"ranks hold different {kind}: the {field} of {one} {name!r} is {tell(sides)}. {remedy}"
    return None
