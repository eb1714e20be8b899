"""The operations of `unified_ddp.hooks` on torch tensors."""

import numpy as np
import torch

from unified_ddp.hooks.ops import Ops


class TorchOps(Ops):
    """Operations on one device's tensors. Words of 32 bits are held in int64."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(torch)
        self._device = device

    def from_numpy(self, array: np.ndarray) -> torch.Tensor:
        """Returns a copy of the array on the device."""
        wide = array.astype(np.int64) if array.dtype == np.uint32 else array
        return torch.tensor(wide, device=self._device)

    def cast(self, array: torch.Tensor, dtype: str) -> torch.Tensor:
        """Returns the tensor in a dtype."""
        return array.to(torch.int64 if dtype == "uint32" else getattr(torch, dtype))

    def zeros(self, count: int, dtype: str) -> torch.Tensor:
        """Returns zeros on the device."""
        return torch.zeros(count, dtype=getattr(torch, dtype), device=self._device)

    def top_k(self, array: torch.Tensor, k: int) -> torch.Tensor:
        """Returns the indices of the largest; torch.topk itself chooses freely among equal ones."""
        least = torch.topk(array, k, sorted=True).values[-1]
        larger, equal = array > least, array == least
        chosen = larger | (equal & (torch.cumsum(equal, 0) <= k - larger.sum()))
        return torch.nonzero_static(chosen, size=k)[:, 0].to(torch.int32)
