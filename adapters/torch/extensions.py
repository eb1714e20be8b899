"""What `DistributedDataParallel` offers beyond torch's class."""

from typing import TYPE_CHECKING

import torch

from unified_ddp.errors import ReductionError

if TYPE_CHECKING:
    from torch.distributed.algorithms.join import _JoinConfig

    from unified_ddp.torch.gradient_reducer import GradientReducer

__all__ = ["DDPExtensions"]


class DDPExtensions:
    """Mixed into `DistributedDataParallel`."""

    if TYPE_CHECKING:
        reducer: GradientReducer
        _join_config: _JoinConfig

    @torch._disable_dynamo
    def sync_gradients(self) -> None:
        """Reduces every `.grad` as it is now, without a forward or backward pass; every rank calls it.

        For what `no_sync` accumulated, what came through `ddp.module` and what was assigned by hand. A gradient missing
        on some ranks counts as zero; one missing on all stays None. What is equal on all ranks stays as it is, unless
        a comm hook loses precision.

        Raises:
            ReductionError: a backward pass is under way, or an exception ended the last one when gradients were half
                reduced, or ranks without inputs are in a `join` context, where they cannot answer this call.
        """
        if self._join_config.enable:
            raise ReductionError(
                "sync_gradients() cannot be called inside `join`: ranks without inputs do not answer it. Let the last "
                "backward pass of each step run outside no_sync instead"
            )
        with self.reducer.errors_logged(), torch.autograd.profiler.record_function("unified_ddp::sync_gradients"):
            self.reducer.reduce_accumulated()
