"""A bucket of one parameter with a sparse gradient: the gradient itself is reduced, there is no flat memory."""

from collections.abc import Collection

import torch

from unified_ddp.passes import BucketState
from unified_ddp.plan import BucketSpec
from unified_ddp.torch.reduction.storage import Context, missing_in_context


class SparseBucketStorage:
    """The sparse counterpart of `BucketStorage`.

    Args:
        spec: the bucket.
        param: its parameter, of shape (rows, ...); gradients are sparse in the first dimension.
    """

    def __init__(self, spec: BucketSpec, param: torch.Tensor) -> None:
        self.spec = spec
        self.params = [param]
        self.flat = self._empty()
        self._dense = False

    def gradient(self, position: int = 0, context: Context | None = None) -> torch.Tensor | None:
        """Returns the gradient to pack."""
        param = self.params[position]
        return param.grad if context is None else context.get(param)

    @property
    def views(self) -> list[torch.Tensor]:
        """The gradient being reduced."""
        return [self.flat]

    def pack_one(self, position: int, scale: float, state: BucketState) -> None:
        """Sparse gradients are packed when their bucket is launched."""

    def pack_rest(self, scale: float, state: BucketState, context: Context | None = None) -> None:
        """Takes a copy of the gradient. A missing one counts as zero, a dense one is made sparse."""
        grad = self.gradient(context=context)
        with torch.no_grad():
            self._dense = grad is not None and not grad.is_sparse
            if grad is None or scale == 0.0:
                self.flat = self._empty()
                state.absent.update([0] if grad is None else ())
            else:
                own = grad.to_sparse(1) if self._dense else grad.clone()
                self.flat = own if scale == 1.0 else own.mul_(scale)

    def mark_present(self, state: BucketState) -> None:
        """Nothing to do: how a missing gradient counts is not told by its values."""

    def unpack(
        self, reduced: torch.Tensor, keep: Collection[int], state: BucketState, context: Context | None = None
    ) -> Collection[int]:
        """Makes `reduced` the gradient, dense again if this rank's was; returns [0] if `.grad` is reduced now."""
        if keep:
            return []
        param = self.params[0]
        with torch.no_grad():
            result = reduced.to_dense() if self._dense and reduced.is_sparse else reduced
            held = self.gradient(context=context)
            if state.absent and _has_values(result):
                state.lent = set(state.absent)
                if context is not None:
                    raise missing_in_context(param)
            if held is not None and held.layout == result.layout:
                held.copy_(result)
            elif context is None:
                param.grad = result
        self.flat = self._empty()
        return [0] if context is None else []

    def _empty(self) -> torch.Tensor:
        param = self.params[0]
        indices = torch.zeros((1, 0), dtype=torch.int64, device=param.device)
        values = torch.zeros((0, *param.shape[1:]), dtype=param.dtype, device=param.device)
        return torch.sparse_coo_tensor(indices, values, param.shape, check_invariants=False)


def _has_values(tensor: torch.Tensor) -> bool:
    return tensor._nnz() > 0 if tensor.is_sparse else bool(tensor.any())
