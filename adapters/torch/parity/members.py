"""Members of torch's class that its tests and other libraries use, where they touch the reduction."""

import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _rank_not_in_group

from unified_ddp.torch.comm_hooks.optimizer_in_backward import StepOptimizersState, step_optimizers_hook
from unified_ddp.torch.module.buffers import broadcast_buffers
from unified_ddp.torch.module.sync_batchnorm import adopt_sync_batchnorm
from unified_ddp.torch.reduction.comm_hook import CommHook, builtin_hook

if TYPE_CHECKING:
    from unified_ddp.torch.parity.logging_data import DDPLogger
    from unified_ddp.torch.reduction.gradient_reducer import GradientReducer

__all__ = ["DDPMembers"]


class DDPMembers:
    """Mixed into `DistributedDataParallel`; each member does what torch's does, over our reducer."""

    if TYPE_CHECKING:
        module: nn.Module
        reducer: GradientReducer
        logger: DDPLogger
        process_group: dist.ProcessGroup
        device: torch.device
        static_graph: bool
        find_unused_parameters: bool
        gradient_as_bucket_view: bool
        parameters_to_ignore: set[str]
        broadcast_bucket_size: int
        modules_buffers: list[torch.Tensor]
        _builtin_hook: dist.BuiltinCommHookType | None
        _module_parameters: list[nn.Parameter]
        _use_hook: Callable[[CommHook], None]
        _reduced_parameters: Callable[[], dict[str, tuple[nn.Parameter, bool]]]

    # Dynamo's python_reducer mode is not supported.
    _use_python_reducer = False
    _force_to_disable_cpp_reducer = False

    def _lazy_init(self) -> None:
        self._setup_in_backward_optimizers()
        self._lazy_init_ran = True

    def _setup_in_backward_optimizers(self) -> None:
        """Steps optimizers of `_apply_optimizer_in_backward` after a parameter's bucket is reduced, not before."""
        if not any(hasattr(p, "_in_backward_optimizers") for p in self._module_parameters):
            return
        from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

        for param in self._module_parameters:
            for handle in param_to_optim_hook_handle_map.get(param, []):
                handle.remove()
        state = StepOptimizersState.on(self.device, weakref.ref(self))
        self._use_hook(CommHook(step_optimizers_hook, state))
        self.reducer._set_optimizer_in_backward()

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        """Registers one of torch's built-in comm hooks, ALLREDUCE or FP16_COMPRESS."""
        self.reducer.register_comm_hook(builtin_hook(comm_hook_type, self.process_group))
        self._builtin_hook = comm_hook_type
        self.logger._set_comm_hook_name(str(comm_hook_type))

    def _set_static_graph(self) -> None:
        """Declares the graph static after construction; the `static_graph` argument is to be preferred.

        Raises:
            RuntimeError: training has begun.
        """
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        self.reducer._set_static_graph()
        self.static_graph = True
        self.logger._set_static_graph()
        if self.find_unused_parameters:
            warnings.warn(
                "You passed find_unused_parameters=true to DistributedDataParallel, `_set_static_graph` will detect "
                "unused parameters automatically, so you do not need to set find_unused_parameters=true, just be sure "
                "these unused parameters will not change during training loop while calling `_set_static_graph`.",
                stacklevel=2,
            )

    def _default_broadcast_coalesced(
        self, bufs: list[torch.Tensor] | None = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        """Gives all ranks the buffers of one; a backward pass that still needs old values keeps them."""
        broadcast_buffers(
            self.process_group,
            self.module,
            self.modules_buffers if bufs is None else bufs,
            self.broadcast_bucket_size if bucket_size is None else bucket_size,
            authoritative_rank,
        )

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Trains on with other ranks; buckets are rebuilt. Comm hooks with groups of their own are the caller's."""
        self._has_rebuilt_buckets = False
        self.reducer._reset_state()
        if not _rank_not_in_group(new_process_group):
            self.process_group = new_process_group
            self.reducer._update_process_group(new_process_group)

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """Returns the parameters to reduce and, for each, whether its gradient is sparse."""
        found = self._reduced_parameters()
        self._assign_modules_buffers()  # type: ignore[attr-defined]
        return [p for p, _ in found.values()], [sparse for _, sparse in found.values()]

    def _passing_sync_batchnorm_handle(self, module: nn.Module) -> None:
        """Makes SyncBatchNorm layers ours where torch has no implementation of them."""
        if self.device_type == "cpu":  # type: ignore[attr-defined]
            adopt_sync_batchnorm(module)
