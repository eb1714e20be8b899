"""The torch side of the reducer: packs gradients into buckets, launches all-reduces or comm hooks, unpacks."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from unified_ddp.plan import BucketPlan
from unified_ddp.reducer import Reduction
from unified_ddp.torch.grad_bucket import GradBucket
from unified_ddp.torch.hooks import CommHook, WorkReduction
from unified_ddp.torch.sparse import SparseBucketStorage
from unified_ddp.torch.storage import BucketStorage
from unified_ddp.torch.transport import ProcessGroupTransport

__all__ = ["EAGER_BYTES", "TorchBackend"]

EAGER_BYTES = 256 * 1024
"""Gradients from this size on are packed one by one as they come, not fused with others: the copy then costs more than
its launch, and with `gradient_as_bucket_view` their memory is free again before the next one is made."""


class TorchBackend:
    """Implements `unified_ddp.reducer.Backend` on torch tensors.

    Args:
        params: the plan's parameters.
        transport: sums over ranks.
        as_views: gradient_as_bucket_view.
    """

    def __init__(self, params: Sequence[torch.Tensor], transport: ProcessGroupTransport, as_views: bool) -> None:
        self.params = list(params)
        self.transport = transport
        self.as_views = as_views
        self.comm_hook: CommHook | None = None
        self.divisor = transport.world_size
        self.storages: list[BucketStorage | SparseBucketStorage] = []
        self._place: list[tuple[int, int]] = []
        self._usage: tuple[torch.Tensor, dist.Work] | None = None
        self.used: list[bool] | None = None
        self.used_by_ranks: list[int] | None = None

    def adopt(self, plan: BucketPlan) -> None:
        """Allocates storage for the plan's buckets, and lets the old one go."""
        self.storages = []
        self._place = [(0, 0)] * len(self.params)
        for index, spec in enumerate(plan.buckets):
            params = [self.params[i] for i in spec.params]
            for position, param in enumerate(spec.params):
                self._place[param] = (index, position)
            self.storages.append(
                SparseBucketStorage(spec, params[0]) if spec.sparse else BucketStorage(spec, params, self.as_views)
            )

    @property
    def scale(self) -> float:
        """Factor on each gradient before summing; a comm hook divides by itself."""
        return 1.0 if self.comm_hook else 1.0 / self.divisor

    def report_usage(self, used: list[bool]) -> None:
        """Gives, before a backward pass is finished, which parameters this rank used; asks all ranks for theirs."""
        self.used = used

    def pack_param(self, param: int) -> None:
        """Packs one gradient now."""
        bucket, position = self._place[param]
        self.storages[bucket].pack_one(position, self.scale)

    def launch(self, bucket: int) -> Reduction:
        """Packs the rest of the bucket and starts its reduction."""
        storage = self.storages[bucket]
        storage.pack_rest(self.scale)
        if self.comm_hook is not None:
            return self.comm_hook(GradBucket(bucket, bucket == len(self.storages) - 1, storage))
        return WorkReduction(self.transport.all_reduce(storage.flat), storage.flat)

    def all_launched(self) -> None:
        """Starts asking all ranks which parameters they used, if `report_usage` was called."""
        self.used_by_ranks = None
        if self.used is not None:
            mine = torch.tensor(self.used, dtype=torch.int32, device=self.transport.device)
            self._usage = (mine, self.transport.all_reduce(mine))

    def unpack(self, bucket: int, reduced: torch.Tensor) -> None:
        """Makes `reduced` the gradients of the bucket, save of parameters that no rank used."""
        storage = self.storages[bucket]
        storage.unpack(reduced, self._unused_everywhere(storage.spec.params) if self.used is not None else ())

    def finished(self) -> None:
        """Ends a backward pass."""
        if self._usage is not None:
            self._usage[1].wait()
        self._usage = None
        self.used = None

    def _unused_everywhere(self, params: Sequence[int]) -> set[int]:
        """Returns positions in the bucket; talks to the device only if this rank left some parameter unused."""
        assert self.used is not None
        here = [(position, param) for position, param in enumerate(params) if not self.used[param]]
        if not here:
            return set()
        counts = self.usage()
        return {position for position, param in here if counts[param] == 0}

    def usage(self) -> list[int]:
        """Returns, once all buckets are launched, on how many ranks each parameter was used."""
        if self.used_by_ranks is None:
            assert self._usage is not None
            counts, work = self._usage
            work.wait()
            self.used_by_ranks = counts.tolist()
        return self.used_by_ranks
