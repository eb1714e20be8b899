"""The wrapper's iterations: forwards that prepare the reduction of the backward passes through their outputs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel.distributed import _find_tensors

from unified_ddp.errors import UnusedParameterError
from unified_ddp.ranks.control import Does, Event
from unified_ddp.torch.wrapped import WrappedModule


class AveragingModule(WrappedModule):
    """Runs the module, and has its gradients averaged over the ranks in the backward pass."""

    def _follow_changes(self, does: Does) -> None:
        """Makes another reducer if the module was changed, and compares the comm hooks once."""
        if Does.FOLLOWS_MODULE in does:
            self._follow_module()
        if not self._hooks_compared:
            self._compare_hooks()

    # Dynamo leaves this frame alone and compiles the module's; what surrounds it is none of its business.
    @torch._disable_dynamo(recursive=False)
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module; a backward pass through what it returns reduces the gradients."""
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            return self._post_forward(self._run_ddp_forward(*inputs, **kwargs))

    @torch._disable_dynamo(recursive=False)
    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self._inside_ddp_forward():
            return self.module(*inputs, **kwargs)

    @torch._disable_dynamo
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        grads = torch.is_grad_enabled()
        sync = grads and self.require_backward_grad_sync
        with self.reducer.errors_noted():
            if grads:
                self._progress.forward(sync)
            self._control.is_paused = self._join_config.enable
            does = self._communicates(sync)
            if does or (grads and dist.get_debug_level() == dist.DebugLevel.DETAIL):
                kind = Does.NOTHING if sync else Does.IS_LOCAL if grads else Does.RECORDS_NOTHING
                self._announce(Event.FORWARD, does | kind)
            if sync:
                self.reducer.core.agree()
                self._follow_changes(does)
                self._prepare_for_forward()
            work = Join.notify_join_context(self)
            if work:
                self.reducer.scaling.divide_by_joined(None if self._divide_by_initial_world_size else work)
            if sync and self.reducer.rebuild_buckets():
                self._has_rebuilt_buckets = True
        self._before_module(does)
        if Does.SYNCS_BUFFERS in does:
            with self._progress.waiting(self._progress.forward_name, "the sync of buffers"):
                self._sync_buffers()
        if self._join_config.enable:
            self._check_global_requires_backward_grad_sync(is_joined_rank=False)
        if self.device_ids:
            moved_inputs, moved_kwargs = self.to_kwargs(inputs, kwargs, self.device_ids[0])
            inputs, kwargs = moved_inputs[0], moved_kwargs[0]
        if self._mixed is not None:
            self._mixed.lower()
            inputs, kwargs = self._mixed.cast_inputs(inputs, kwargs)
        return inputs, kwargs

    def _communicates(self, sync: bool) -> Does:
        """Returns what a forward communicates beside gradients; the ranks then tell each other."""
        does = Does.NOTHING
        if sync:
            does |= self._prepares()
        if self._check_sync_bufs_pre_fwd():
            does |= Does.SYNCS_BUFFERS
        if self._check_sync_bufs_post_fwd():
            does |= Does.SYNCS_BUFFERS_AFTER
        return does

    def _prepares(self) -> Does:
        """Returns what a reduction needs before it."""
        does = Does.NOTHING
        self.reducer.give_up_what_is_left()
        if self.reducer.core.is_in_doubt:
            does |= Does.AGREES
        if self._watch.changed():
            does |= Does.FOLLOWS_MODULE
        elif self.reducer.has_order_to_rebuild:
            does |= Does.REBUILDS_BUCKETS
        if self.options.init_sync and not (self._hooks_compared or self._join_config.enable):
            does |= Does.COMPARES_HOOKS
        return does

    def _before_module(self, does: Does) -> None:
        """Does what else was announced, before the module is run."""

    def _prepare_for_forward(self) -> None:
        try:
            self.reducer.prepare_for_forward()
        except UnusedParameterError:
            if not self._watch.differs():
                raise
            self._announce(Event.FORWARD, Does.FOLLOWS_MODULE)
            self._follow_module()  # the unused parameters are no longer the module's
            self.reducer.prepare_for_forward()

    @torch._disable_dynamo
    def _post_forward(self, output: Any) -> Any:
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        sync = torch.is_grad_enabled() and self.require_backward_grad_sync
        if sync and self._watch.changed_inside():
            self._follow_module_inside()
        self.require_forward_param_sync = sync
        self.reducer.prepare_for_backward(_find_tensors(output), sync)
        if self._mixed is not None and not torch.is_grad_enabled():
            self._mixed.restore()
        return output

    @contextmanager
    def no_sync(self, *, enabled: bool = True) -> Iterator[None]:
        """Forwards in this context leave gradients local; they are reduced with the next synchronising backward pass.

        The forward must be inside; a backward pass is synchronising if its forward was.

        Args:
            enabled: False changes nothing, so that one loop serves all microbatches of a step:
                `with ddp.no_sync(enabled=not last): ...`.
        """
        before = self._grad_sync
        self._grad_sync = before and not enabled
        try:
            yield
        finally:
            self._grad_sync = before

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the backward passes through the outputs of the next forward are reduced.

        Set between a forward and its backward pass, it holds for that pass, too.
        """
        return self._grad_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, sync: bool) -> None:
        self._grad_sync = sync
        if "reducer" in self.__dict__:
            self.reducer.say_sync(sync)
