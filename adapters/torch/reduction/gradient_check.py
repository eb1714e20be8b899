"""For users in doubt: the reduced gradients of some passes beside the oracle, made of the ranks' local gradients."""

from collections.abc import Collection
from typing import Any

import torch

from unified_ddp.errors import ReductionError
from unified_ddp.passes import PassKind
from unified_ddp.ranks.texts import ranks_text
from unified_ddp.torch.reduction.backend import TorchBackend, TorchPass

_ROUNDINGS = 64
"""How many roundings of the largest local gradients, in the dtype that is reduced in, are no difference."""


class CheckedBackend(TorchBackend):
    """Compares every so many passes with sums of its own, in double precision and parameter by parameter.

    Passes that a comm hook reduces are not compared: it may round as it likes.

    Args:
        every: so many passes.
        arguments: as of `TorchBackend`.
    """

    def __init__(self, every: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._every = every
        self._local: dict[int, torch.Tensor] = {}

    def _is_due(self, current: TorchPass) -> bool:
        return current.number % self._every == 0 and self.comm_hook is None and current.kind is not PassKind.SHADOW

    def pack_param(self, current: TorchPass, param: int) -> None:
        """Packs one gradient now."""
        if self._is_due(current):
            self._keep(current, param)
        super().pack_param(current, param)

    def pack(self, current: TorchPass, bucket: int) -> None:
        """Packs the rest of the bucket."""
        if self._is_due(current):
            for position, param in enumerate(current.plan.buckets[bucket].params):
                if position not in current.buckets[bucket].packed:
                    self._keep(current, param)
        super().pack(current, bucket)

    def _keep(self, current: TorchPass, param: int) -> None:
        bucket, position = self._place[param]
        grad = self.storages[bucket].gradient(position, current.context)
        if grad is not None:
            factor = self.scaling.scale(current.share, hooked=False) * self.scaling.part(param)
            self._local[param] = _wide(grad) * factor if factor else torch.zeros_like(_wide(grad))

    def _unpack(self, current: TorchPass, bucket: int, reduced: torch.Tensor, keep: Collection[int]) -> Collection[int]:
        positions = super()._unpack(current, bucket, reduced, keep)
        if self._is_due(current):
            self._compare(current, bucket, positions)
        return positions

    def _compare(self, current: TorchPass, bucket: int, reduced: Collection[int]) -> None:
        differences = [
            self._difference(param, self.storages[bucket].flat.dtype, position in reduced)
            for position, param in enumerate(current.plan.buckets[bucket].params)
        ]
        every = self.transport.all_gather_text(next(filter(None, differences), ""))
        ranks = [rank for rank, text in enumerate(every) if text]
        if ranks:
            raise ReductionError(
                f"in {self.progress.pass_name}, bucket {bucket}, reduced gradients differ from the sum of the ranks' "
                f"local ones on {ranks_text(ranks)}: {every[ranks[0]]}. Do not step the optimizer: something changes "
                "gradients, or the memory that they are reduced in, during the backward pass"
            )

    def _difference(self, param: int, dtype: torch.dtype, is_reduced: bool) -> str:
        """Takes part in the sum of one parameter's gradients, and returns how `.grad` differs; empty if it does not."""
        tensor = self.params[param]
        total = self._local.pop(param, None)
        total = torch.zeros_like(_wide(tensor)) if total is None else total.contiguous()
        largest = total.abs().amax().reshape(1) if total.numel() else torch.zeros(1, device=tensor.device).double()
        for summed in (total, largest):
            self.transport.all_reduce(summed).wait()
        if not is_reduced or not total.numel():
            return ""
        have = torch.zeros_like(total) if tensor.grad is None else _wide(tensor.grad)
        if torch.equal(torch.isfinite(have), torch.isfinite(total)):
            finite = torch.isfinite(total)
            have, total = have[finite], total[finite]
            off = (have - total).abs().max().item() if have.numel() else 0.0
            if off <= _ROUNDINGS * torch.finfo(dtype).eps * largest.item() or not torch.isfinite(largest).item():
                return ""
        else:
            off = float("nan")
        return f"{self._names[self._place[param][0]][self._place[param][1]]} is off by {off:g}"


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    dense = (tensor.to_dense() if tensor.is_sparse else tensor).detach().resolve_conj()
    return dense.to(torch.complex128 if dense.is_complex() else torch.float64, copy=True)
