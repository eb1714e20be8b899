"""The members of torch's Reducer that its own code, its tests and other libraries call, over our reducer."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from unified_ddp.torch.reduction.backend import TorchPass
from unified_ddp.torch.reduction.bucket import GradBucket
from unified_ddp.torch.reduction.gradient_reducer import GradientReducer


class TorchsReducer(GradientReducer):
    """Each member does what torch's does."""

    logger: Any
    _last_counts: torch.Tensor | None = None

    @contextmanager
    def errors_noted(self) -> Iterator[None]:
        """Notes errors in the logging data."""
        try:
            yield
        except (RuntimeError, TypeError, ValueError) as error:
            self.logger.set_error_and_log(str(error))
            raise

    def _rebuild_buckets(self) -> bool:
        return self.rebuild_buckets()

    def _check_reducer_finalized(self) -> None:
        self.usage.require_covered(self.transport.rank)

    def _get_local_used_map(self) -> torch.Tensor:
        """Returns on how many ranks each parameter was used in the last backward pass that asked; int32."""
        if self._last_counts is None:
            return torch.zeros(len(self.params), dtype=torch.int32, device=self.transport.device)
        return self._last_counts

    def _ended(self, current: TorchPass) -> None:
        super()._ended(current)
        if current.counting is not None:
            self._last_counts = current.counting.counts

    def _get_zeros_like_grad_buckets(self) -> list[GradBucket]:
        return [self.backend.zero_bucket(b) for b in range(len(self.backend.storages))]

    def _run_comm_hook(self, bucket: GradBucket) -> torch.futures.Future:
        if self.backend.comm_hook is not None:
            return self.backend.comm_hook.start(bucket)
        return self._run_allreduce_hook(bucket)

    def _run_allreduce_hook(self, bucket: GradBucket) -> torch.futures.Future:
        """Sums a bucket over ranks, without dividing."""
        return self.transport.all_reduce(bucket.buffer()).get_future()

    def _install_post_backward_futures(self, futures: list[torch.futures.Future]) -> None:
        self._post_backward.extend(futures)

    def _set_forward_pass_work_handle(self, work: Any, use_static_world_size: bool) -> None:
        self.scaling.divide_by_joined(None if use_static_world_size else work)

    def _push_all_rebuilt_params(self) -> None:
        if self._observed is None:
            self._observed = list(reversed(range(len(self.params))))

    def _remove_autograd_hooks(self) -> None:
        self.remove_hooks()

    def graph_is_static(self) -> bool:
        """Whether every iteration so far used the same parameters."""
        return self.usage.never_changed

    def _ddp_graph_static(self) -> bool:
        return self.graph_is_static()

    @property
    def last_unused(self) -> list[int]:
        """Parameters that the iteration under way has not used."""
        return self.usage.unused

    def _set_static_graph(self) -> None:
        with self.errors_noted():
            if self.usage.iterations or self.usage.under_way:
                raise RuntimeError("_set_static_graph() should be called before training loop starts")
        self.usage.static = True

    def _reset_state(self) -> None:
        """Forgets observed orders and iterations, so that buckets are rebuilt."""
        self.core.drop()
        self.rebuilt, self._observed = False, None
        self.usage.restart()

    def _update_process_group(self, group: Any) -> None:
        self.transport.group = group

    def set_logger(self, logger: Any) -> None:
        """Takes the logger that errors are noted in."""
        self.logger = logger

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        self.logger.sample_rate = sample_rate

    def _set_sparse_metadata(self, global_unique_ids: dict[str, torch.Tensor]) -> None:
        """Takes the rows that all ranks touch, by parameter; sparse gradients are summed without knowing them."""

    def _set_optimizer_in_backward(self) -> None:
        """The comm hook that steps optimizers was registered; nothing else changes here."""
