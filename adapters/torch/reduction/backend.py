"""The torch side of the reducer: packs gradients into buckets, launches all-reduces or comm hooks, unpacks."""

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from unified_ddp.plan import BucketPlan, BucketSpec
from unified_ddp.ranks.progress import Progress
from unified_ddp.ranks.texts import shortened
from unified_ddp.reducer import Reduction
from unified_ddp.torch.reduction.bucket import GradBucket
from unified_ddp.torch.reduction.comm_hook import CommHook, DenseReduction, NoReduction, WorkReduction
from unified_ddp.torch.reduction.mixed_precision import MixedBucketStorage, MixedPrecision
from unified_ddp.torch.reduction.scaling import Scaling
from unified_ddp.torch.reduction.sparse import SparseBucketStorage
from unified_ddp.torch.reduction.storage import BucketStorage, scale_gradient
from unified_ddp.torch.reduction.transport import ProcessGroupTransport

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
        skip_unused: leave out buckets that no rank used.
        mixed: casts for the reduction, if mixed precision is asked for.
        progress: names the pass in errors.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        transport: ProcessGroupTransport,
        as_views: bool,
        skip_unused: bool = False,
        mixed: MixedPrecision | None = None,
        *,
        progress: Progress,
    ) -> None:
        self.progress = progress
        self.params = list(params)
        self.transport = transport
        self.as_views = as_views
        self.comm_hook: CommHook | None = None
        self.divisor = transport.world_size
        self.scaling: Scaling | None = None
        """Makes another sum than the mean of it."""
        self.storages: list[BucketStorage | SparseBucketStorage] = []
        self._names: list[list[str]] = []
        self._place: list[tuple[int, int]] = []
        self.skip_unused = skip_unused
        self.mixed = mixed
        self.launched = 0
        self.on_reduced: Callable[[Iterable[int]], None] = lambda _params: None
        self.on_first_launch: Callable[[], None] = lambda: None
        self.known_usage: list[int] | None = None
        self.last_counts: torch.Tensor | None = None
        """On how many ranks each parameter was used in the last backward pass that asked; int32, on the device."""
        self._host_counts: list[int] | None = None
        self._used: list[bool] | None = None
        self._counts: tuple[torch.Tensor, dist.Work] | None = None
        self._join_work: dist.Work | None = None

    def adopt(self, plan: BucketPlan) -> None:
        """Allocates storage for the plan's buckets, and lets the old one go."""
        self.storages = []
        self._names = [[plan.params[i].name for i in spec.params] for spec in plan.buckets]
        self._place = [(0, 0)] * len(self.params)
        for index, spec in enumerate(plan.buckets):
            params = [self.params[i] for i in spec.params]
            for position, param in enumerate(spec.params):
                self._place[param] = (index, position)
            self.storages.append(self._storage(spec, params))

    def _storage(self, spec: BucketSpec, params: list[torch.Tensor]) -> BucketStorage | SparseBucketStorage:
        if spec.sparse:
            return SparseBucketStorage(spec, params[0])
        if self.mixed is not None:
            return MixedBucketStorage(spec, params, self.mixed)
        return BucketStorage(spec, params, self.as_views)

    @property
    def scale(self) -> float:
        """Factor on each gradient before summing; a comm hook divides by itself."""
        if self.scaling is not None:
            return self.scaling.factor() * (self.transport.world_size if self.comm_hook else 1)
        return 1.0 if self.comm_hook else 1.0 / self.divisor

    def start_step(self) -> None:
        """Starts a synchronising backward pass."""
        self.launched = 0
        self._used = self._counts = self._host_counts = None
        for storage in self.storages:
            storage.restart()
        if self.scaling is not None:
            self.scaling.begin()
        if self._join_work is not None:
            # Ranks that have not joined sum ones; the result is ready before the first gradient is packed.
            with self.progress.waiting(self.progress.pass_name, "the count of ranks with inputs"):
                self._join_work.wait()
            self.divisor = int(self._join_work.result()[0].item())
            self._join_work = None

    def set_join_work(self, work: dist.Work | None) -> None:
        """Takes the sum, under way, that says how many ranks have inputs; None divides by all ranks."""
        self._join_work = work
        if work is None:
            self.divisor = self.transport.world_size

    def report_usage(self, used: list[bool]) -> None:
        """Gives, before a backward pass is finished, which parameters this rank used; all ranks then tell theirs."""
        self._used = used

    def ask_usage(self, used: list[bool]) -> None:
        """Starts the exchange now."""
        self._used = used
        mine = torch.tensor(used, dtype=torch.int32, device=self.transport.device)
        self._counts = (mine, self.transport.all_reduce(mine))

    def scale_gradient(self, param: int, factor: float) -> None:
        """Scales what the parameter's gradient holds so far."""
        if self.mixed is not None:
            self.mixed.scale_gradient(self.params[param], factor)
        else:
            scale_gradient(self.params[param], factor)

    def has_gradient(self, param: int) -> bool:
        """Says whether this rank has a gradient for the parameter."""
        bucket, position = self._place[param]
        return self.storages[bucket].gradient(position) is not None

    def enter_context(self, gradients: dict[torch.Tensor, torch.Tensor]) -> None:
        """Until the end of this backward pass, reduces these gradients in place, not `.grad`."""
        for storage in self.storages:
            storage.context = gradients

    def pack_param(self, param: int) -> None:
        """Packs one gradient now."""
        bucket, position = self._place[param]
        self.storages[bucket].pack_one(position, self.scale)

    def launch(self, bucket: int) -> Reduction:
        """Packs the rest of the bucket and starts its reduction."""
        storage = self.storages[bucket]
        if self.skip_unused and self._is_skipped(storage):
            return NoReduction(storage.flat)
        storage.pack_rest(self.scale)
        if self.scaling is not None:
            self.scaling.adjust(storage)
        return self._reduce(self._grad_bucket(bucket))

    def launch_zeros(self, bucket: int) -> Reduction:
        """Takes part in the bucket's reduction with zeros, leaving the gradients alone."""
        if self.skip_unused and self._is_skipped(self.storages[bucket], here=False):
            return NoReduction(self.storages[bucket].flat)
        return self._reduce(self.zero_bucket(bucket))

    def zero_bucket(self, bucket: int) -> GradBucket:
        """Returns the bucket with zeros in the place of gradients."""
        grad_bucket = self._grad_bucket(bucket)
        grad_bucket.set_buffer(torch.zeros_like(self.storages[bucket].flat))
        return grad_bucket

    def _grad_bucket(self, bucket: int) -> GradBucket:
        last = bucket == len(self.storages) - 1
        return GradBucket(bucket, last, self.storages[bucket], self._names[bucket])

    def _reduce(self, bucket: GradBucket) -> Reduction:
        if self.launched == 0:
            self.on_first_launch()
        self.launched += 1
        if self.comm_hook is not None:
            try:
                return self.comm_hook(bucket)
            except RuntimeError as error:
                raise self.failure(bucket.index(), error) from error
        storage = bucket.buffer()
        if storage.is_sparse and not self.transport.sums_sparse:
            dense = storage.to_dense()
            return DenseReduction(self.transport.all_reduce(dense), dense)
        return WorkReduction(self.transport.all_reduce(storage), storage)

    def _wait_for_usage(self) -> None:
        assert self._counts is not None
        with self.progress.waiting(self.progress.pass_name, "the exchange of used parameters"):
            self._counts[1].wait()

    def _is_skipped(self, storage: BucketStorage | SparseBucketStorage, here: bool = True) -> bool:
        # A bucket with a gradient expected here is launched at once; the others wait for the end of the backward
        # pass, when the ranks' answers are in.
        assert self._used is not None
        if here and any(self._used[i] for i in storage.spec.params):
            return False
        counts = self.usage()
        return not any(counts[i] for i in storage.spec.params)

    def all_launched(self) -> None:
        """Starts the exchange of used parameters, if `report_usage` was called."""
        if self._used is not None and self._counts is None:
            self.ask_usage(self._used)

    def unpack(self, bucket: int, reduced: torch.Tensor) -> None:
        """Makes `reduced` the gradients of the bucket, save of parameters that no rank used."""
        storage = self.storages[bucket]
        positions = storage.unpack(reduced, self._unused_everywhere(storage.spec.params))
        self.on_reduced(storage.spec.params[i] for i in positions)

    def failure(self, bucket: int, error: RuntimeError) -> Exception:
        """Returns the error that names the bucket, its parameters and the ranks that did not arrive."""
        what = "comm hook" if self.comm_hook is not None else "all-reduce"
        detail = f"the {what} of bucket {bucket} ({shortened(self._names[bucket])})"
        return self.progress.failure(self.progress.pass_name, detail, error)

    def finished(self, need_counts: bool = False) -> list[int] | None:
        """Ends a backward pass. Returns on how many ranks each parameter was used, if that was asked and is needed."""
        counts = self.usage() if need_counts and self._counts is not None else None
        if self._counts is not None:
            self._wait_for_usage()
            self.last_counts = self._counts[0]
        self._used = self._counts = self._host_counts = None
        for storage in self.storages:
            storage.context = None
        return counts

    def _unused_everywhere(self, params: Sequence[int]) -> set[int]:
        """Returns positions in the bucket; waits for the other ranks only if this one left some parameter unused."""
        if self._used is not None:
            here = [(position, param) for position, param in enumerate(params) if not self._used[param]]
            if not here:
                return set()
            counts = self.usage()
            return {position for position, param in here if counts[param] == 0}
        if self.known_usage is not None:
            # a static graph; a parameter that has a gradient all the same is not left out
            unused = [(position, param) for position, param in enumerate(params) if self.known_usage[param] == 0]
            return {position for position, param in unused if not self.has_gradient(param)}
        return set()

    @property
    def lent(self) -> list[int]:
        """Parameters without a gradient here that got one from other ranks in the last backward pass."""
        return [storage.spec.params[position] for storage in self.storages for position in storage.lent]

    def usage(self) -> list[int]:
        """Returns, once the exchange was started, on how many ranks each parameter was used."""
        if self._host_counts is None:
            self._wait_for_usage()
            assert self._counts is not None
            self._host_counts = self._counts[0].tolist()
        return self._host_counts
