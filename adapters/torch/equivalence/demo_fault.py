"""A torch comm hook that reduces one bucket wrongly."""

import torch
import torch.distributed as dist
from torch import Tensor

from unified_ddp.equivalence.demo.config import Fault, VerifyConfig


class FaultyAllReduce:
    """State of the hook: averages every bucket as DDP does, except the one at fault while `active`."""

    def __init__(self, config: VerifyConfig, rank: int) -> None:
        self.config, self.rank, self.active = config, rank, False
        self.previous: Tensor | None = None

    def hook(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Reduces one bucket; registered as `register_comm_hook(state, FaultyAllReduce.hook)`."""
        storage = bucket.buffer()
        if self.active and bucket.index() == self.config.inject_bucket:
            if self.config.inject is Fault.SKIP_BUCKET:
                return _done(storage)
            if self.config.inject is Fault.SUM:
                return _all_reduce(storage)
            if self.config.inject is Fault.STALE_RANK:
                storage = self._stale(storage)
        return _all_reduce(storage.div_(self.config.world_size))

    def _stale(self, storage: Tensor) -> Tensor:
        current, previous = storage.clone(), self.previous
        self.previous = current
        if previous is not None and self.rank == self.config.rank_at_fault:
            storage.copy_(previous)
        return storage


def _done(storage: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(storage)
    return future


def _all_reduce(storage: Tensor) -> torch.futures.Future[Tensor]:
    return dist.all_reduce(storage, async_op=True).get_future().then(lambda future: future.value()[0])
