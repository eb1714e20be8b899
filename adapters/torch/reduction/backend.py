"""The torch side of the reducer: packs gradients into buckets, launches all-reduces or comm hooks, unpacks."""

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from unified_ddp.passes import Pass, PassKind, Reduction
from unified_ddp.plan import BucketPlan, BucketSpec
from unified_ddp.ranks.progress import Progress
from unified_ddp.ranks.texts import shortened
from unified_ddp.torch.reduction.bucket import GradBucket
from unified_ddp.torch.reduction.comm_hook import CommHook, DenseReduction, WorkReduction
from unified_ddp.torch.reduction.mixed_precision import MixedBucketStorage, MixedPrecision
from unified_ddp.torch.reduction.scaling import MeanScaling, Share
from unified_ddp.torch.reduction.sparse import SparseBucketStorage
from unified_ddp.torch.reduction.storage import BucketStorage, Context
from unified_ddp.torch.reduction.transport import ProcessGroupTransport

EAGER_BYTES = 256 * 1024
"""Gradients from this size on are packed one by one as they come, not fused with others: the copy then costs more than
its launch, and with `gradient_as_bucket_view` their memory is free again before the next one is made."""


class TorchPass(Pass):
    """A pass over torch tensors.

    Args:
        share: this rank's factor.
    """

    def __init__(self, number: int, kind: PassKind, plan: BucketPlan, share: Share) -> None:
        super().__init__(number, kind, plan)
        self.share = share
        self.counting: Count | None = None
        self.context: Context | None = None
        """Reduce these gradients in place, not `.grad`."""
        self.context_id: int | None = None
        """Of distributed autograd, if the backward pass is its."""
        self.end: Callable[[], Any] = lambda: None
        """A weak reference to autograd's callback, which lives as long as the backward pass does."""

    @property
    def is_left(self) -> bool:
        """Whether an exception ended the backward pass: autograd then drops its callbacks, and with them our end."""
        return self.end() is None


@dataclass(frozen=True)
class Count:
    """The sum over ranks, under way, of which parameters each used; int32, on the device."""

    counts: torch.Tensor
    work: dist.Work
    progress: Progress

    def wait(self) -> None:
        """Waits (NCCL: makes the current stream wait)."""
        with self.progress.waiting(self.progress.pass_name, "the exchange of used parameters"):
            self.work.wait()

    def result(self) -> list[int]:
        """Waits, on the host, and returns the counts."""
        self.wait()
        return self.counts.tolist()


class TorchBackend:
    """Implements `unified_ddp.reducer.Backend` on torch tensors.

    Args:
        params: the plan's parameters.
        transport: sums over ranks.
        scaling: makes the sum a mean, or what was asked for.
        as_views: gradient_as_bucket_view.
        mixed: casts for the reduction, if mixed precision is asked for.
        progress: names the pass in errors.
        ended: hears that a pass is reduced.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        transport: ProcessGroupTransport,
        scaling: MeanScaling,
        as_views: bool,
        mixed: MixedPrecision | None,
        progress: Progress,
        ended: Callable[[TorchPass], None],
    ) -> None:
        self.progress = progress
        self.params = list(params)
        self.transport = transport
        self.scaling = scaling
        self.as_views = as_views
        self.mixed = mixed
        self.comm_hook: CommHook | None = None
        self.storages: list[BucketStorage | SparseBucketStorage] = []
        self.on_reduced: Callable[[Iterable[int]], None] = lambda _params: None
        self.on_first_launch: Callable[[], None] = lambda: None
        self._ended = ended
        self._place: list[tuple[int, int]] = []

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

    def begin(self, number: int, kind: PassKind, plan: BucketPlan) -> TorchPass:
        """Returns a new pass."""
        return TorchPass(number, kind, plan, self.scaling.begin(joined=kind is PassKind.SHADOW))

    def has_gradient(self, current: TorchPass | None, param: int) -> bool:
        """Says whether this rank has a gradient for the parameter."""
        bucket, position = self._place[param]
        return self.storages[bucket].gradient(position, current.context if current is not None else None) is not None

    def count_used(self, used: Sequence[bool]) -> Count:
        """Starts telling all ranks which parameters this one used."""
        counts = torch.tensor(used, dtype=torch.int32, device=self.transport.device)
        return Count(counts, self.transport.all_reduce(counts), self.progress)

    def _scale(self, current: TorchPass) -> float:
        return self.scaling.scale(current.share, hooked=self.comm_hook is not None)

    def pack_param(self, current: TorchPass, param: int) -> None:
        """Packs one gradient now."""
        bucket, position = self._place[param]
        self.storages[bucket].pack_one(position, self._scale(current), current.buckets[bucket])

    def pack(self, current: TorchPass, bucket: int) -> None:
        """Packs the rest of the bucket."""
        storage, state = self.storages[bucket], current.buckets[bucket]
        storage.pack_rest(self._scale(current), state, current.context)
        self.scaling.adjust(storage.spec.params, storage.views, state.absent)
        storage.mark_present(state)

    def launch(self, current: TorchPass, bucket: int) -> Reduction:
        """Starts the bucket's reduction."""
        if current.launched == 1:
            self.on_first_launch()
        shadow = current.kind is PassKind.SHADOW
        return self._reduce(self.zero_bucket(bucket) if shadow else self._grad_bucket(bucket))

    def zero_bucket(self, bucket: int) -> GradBucket:
        """Returns the bucket with zeros in the place of gradients."""
        grad_bucket = self._grad_bucket(bucket)
        grad_bucket.set_buffer(torch.zeros_like(self.storages[bucket].flat))
        return grad_bucket

    def _grad_bucket(self, bucket: int) -> GradBucket:
        last = bucket == len(self.storages) - 1
        return GradBucket(bucket, last, self.storages[bucket], self._names[bucket])

    def _reduce(self, bucket: GradBucket) -> Reduction:
        if self.comm_hook is not None:
            try:
                return self.comm_hook(bucket)
            except RuntimeError as error:
                raise self.failure(bucket.index(), error) from error
        storage = bucket.buffer()
        if storage.is_sparse and not self.transport.sums_sparse:
            dense = storage.to_dense()
            return DenseReduction(self._all_reduce(dense), dense)
        return WorkReduction(self._all_reduce(storage), storage)

    def _all_reduce(self, storage: torch.Tensor) -> Callable[[], None]:
        """Starts it, and returns what waits for it."""
        work = self.transport.all_reduce(storage)
        return functools.partial(self.transport.wait, work, self.progress.require_pass_elsewhere)

    def unpack(self, current: TorchPass, bucket: int, reduced: torch.Tensor, keep: set[int]) -> None:
        """Makes `reduced` the gradients of the bucket, save of the positions `keep`."""
        positions = self._unpack(current, bucket, reduced, keep)
        self.on_reduced(current.plan.buckets[bucket].params[i] for i in positions)

    def _unpack(self, current: TorchPass, bucket: int, reduced: torch.Tensor, keep: Collection[int]) -> Collection[int]:
        return self.storages[bucket].unpack(reduced, keep, current.buckets[bucket], current.context)

    def failure(self, bucket: int, error: RuntimeError) -> Exception:
        """Returns the error that names the bucket, its parameters and the ranks that did not arrive."""
        what = "comm hook" if self.comm_hook is not None else "all-reduce"
        detail = f"the {what} of bucket {bucket} ({shortened(self._names[bucket])})"
        return self.progress.failure(self.progress.pass_name, detail, error)

    def end(self, current: TorchPass) -> None:
        """Hears that all is reduced."""
        if self.mixed is not None:
            self.mixed.restore()
        self.scaling.end()
        self._ended(current)

    def frozen(self) -> list[int]:
        """Returns the parameters that ask for no gradient now."""
        return [i for i, p in enumerate(self.params) if not p.requires_grad]

    def lost(self, current: TorchPass) -> list[str]:
        """Returns the parameters of a pass given up whose `.grad` is a view of a bucket being reduced."""
        if not self.as_views:
            return []  # .grad is untouched local gradient, which the next reduction takes in
        held = [i for i in current.held if self.params[i].grad is not None]
        return [current.plan.params[i].name for i in held if torch.count_nonzero(self.params[i].grad)]  # type: ignore[arg-type]
