"""The operations of `unified_ddp.hooks` on torch tensors."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from unified_ddp.hooks.protocol import Steps


class TorchOps:
    """Implements `unified_ddp.hooks.protocol.Ops` on one device. Words of 32 bits are held in int64."""

    sqrt = staticmethod(torch.sqrt)
    log = staticmethod(torch.log)
    cos = staticmethod(torch.cos)
    round = staticmethod(torch.round)
    matmul = staticmethod(torch.matmul)

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def from_numpy(self, array: np.ndarray) -> torch.Tensor:
        """Returns a copy of the array on the device."""
        wide = array.astype(np.int64) if array.dtype == np.uint32 else array
        return torch.tensor(wide, device=self._device)

    def cast(self, array: torch.Tensor, dtype: str) -> torch.Tensor:
        """Returns the tensor in a dtype."""
        return array.to(torch.int64 if dtype == "uint32" else getattr(torch, dtype))

    def zeros(self, count: int, dtype: str) -> torch.Tensor:
        """Returns zeros."""
        return torch.zeros(count, dtype=getattr(torch, dtype), device=self._device)

    def concat(self, arrays: Sequence[torch.Tensor], axis: int = 0) -> torch.Tensor:
        """Joins tensors along an axis."""
        return torch.cat(list(arrays), axis)

    def split(self, flat: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Returns the pieces of a flat tensor, as views."""
        return list(torch.split(flat, list(sizes)))

    def stack(self, arrays: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the tensors along a new first axis."""
        return torch.stack(list(arrays))

    def where(self, condition: torch.Tensor, a: Any, b: Any) -> torch.Tensor:
        """Chooses elementwise."""
        return torch.where(condition, a, b)

    def amax(self, array: torch.Tensor) -> torch.Tensor:
        """Returns the maximum along the last axis."""
        return array.amax(-1, keepdim=True)

    def qr(self, matrices: torch.Tensor) -> torch.Tensor:
        """Returns the orthonormal factors."""
        return torch.linalg.qr(matrices)[0]

    def top_k(self, array: torch.Tensor, k: int) -> torch.Tensor:
        """Returns the indices of the largest; torch.topk itself chooses freely among equal ones."""
        least = torch.topk(array, k, sorted=True).values[-1]
        larger, equal = array > least, array == least
        chosen = larger | (equal & (torch.cumsum(equal, 0) <= k - larger.sum()))
        return torch.nonzero_static(chosen, size=k)[:, 0].to(torch.int32)

    def scatter_sum(self, count: int, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Adds values at indices, rank by rank."""
        total = values.new_zeros(count)
        for places, added in zip(indices, values, strict=True):
            total.index_add_(0, places, added)
        return total

    def branch(self, condition: torch.Tensor, yes: Callable[[], Steps], no: Callable[[], Steps]) -> Steps:
        """Runs one of two."""
        return (yield from (yes if bool(condition) else no)())
