"""What torch's class has beside its reduction, and its tests and other libraries use: members, logging, join."""

import dataclasses
import warnings
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _rank_not_in_group

from unified_ddp.ranks.control import Does
from unified_ddp.torch.comm_hooks.optimizer_in_backward import StepOptimizersState, step_optimizers_hook
from unified_ddp.torch.extensions import ExtendedModule
from unified_ddp.torch.module.broadcast import broadcast
from unified_ddp.torch.module.buffers import broadcast_buffers
from unified_ddp.torch.module.sync_batchnorm import adopt_sync_batchnorm
from unified_ddp.torch.options import Options
from unified_ddp.torch.parity.join import DDPJoinHook
from unified_ddp.torch.parity.logging_data import DDPLogger, module_facts
from unified_ddp.torch.parity.torchs_reducer import TorchsReducer
from unified_ddp.torch.reduction.comm_hook import CommHook, builtin_hook, hook_name


class TorchsMembers(ExtendedModule):
    """Each member does what torch's does, over our reducer."""

    logger: DDPLogger  # type: ignore[assignment]
    _left_behind = (*ExtendedModule._left_behind, "logger")

    # Dynamo's python_reducer mode is not supported.
    _use_python_reducer = False
    _force_to_disable_cpp_reducer = False

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup, options: Options, *placement: Any) -> None:
        self._lazy_init_ran = False
        self._builtin_hook: dist.BuiltinCommHookType | None = None
        super().__init__(module, process_group, options, *placement)
        for name in ("find_unused_parameters", "gradient_as_bucket_view", "static_graph", "mixed_precision"):
            setattr(self, name, getattr(options, name))
        for name in ("skip_all_reduce_unused_params", "batched_grad_copy", "reduction", "check_replicas_every"):
            setattr(self, name, getattr(options, name))
        self.bucket_bytes_cap = options.caps.largest
        self.bucket_bytes_cap_list = list(options.caps.per_bucket)
        self.bucket_bytes_cap_default = options.caps.is_default
        self._accum_grad_hooks: list[Any] = []
        self._ddp_sink_clone = True

    @property
    def broadcast_buffers(self) -> bool:
        """`forward_sync_buffers`, under the only name that torch's class has for it before torch 2.13."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, sync: bool) -> None:
        self.forward_sync_buffers = sync

    def _make_reducer(self) -> None:
        self._passing_sync_batchnorm_handle(self.module)
        super()._make_reducer()
        if self._builtin_hook is not None:
            self._register_builtin_comm_hook(self._builtin_hook)

    def _new_reducer(self) -> TorchsReducer:
        reducer = TorchsReducer(*self._reducer_arguments())
        self.logger = DDPLogger(reducer)
        reducer.set_logger(self.logger)
        self.logger.set_construction_data_and_log(
            device_ids=self.device_ids or [],
            output_device=-1 if self.output_device is None else self.output_device,
            broadcast_buffers=self.forward_sync_buffers,
            static_graph=self.options.static_graph,
            **module_facts(self.module),
        )
        return reducer

    def _use_hook(self, hook: CommHook) -> None:
        super()._use_hook(hook)
        self.logger._set_comm_hook_name(hook_name(hook.hook))

    def _prepare_for_forward(self) -> None:
        self.logger.set_runtime_stats_and_log()
        super()._prepare_for_forward()

    def _communicates(self, sync: bool) -> Does:
        if not self._lazy_init_ran:
            self._lazy_init()
        return super()._communicates(sync)

    def _replace_reducer(self) -> None:
        super()._replace_reducer()
        self._lazy_init()

    def __setstate__(self, state: dict[str, Any]) -> None:
        # the optimizers to step in the backward pass belong to the copy's parameters
        super().__setstate__(state | {"_lazy_init_ran": False})

    def join_hook(self, **kwargs: Any) -> DDPJoinHook:
        """Returns the hook with which this module takes part in a `Join` context.

        Args:
            kwargs: `divide_by_initial_world_size` (True): divide gradients by all ranks, also by those without inputs.
        """
        return DDPJoinHook(self, kwargs.get("divide_by_initial_world_size", True))

    def _log_and_throw(self, err_type: type[Exception], err_msg: str) -> None:
        if "logger" in self.__dict__:
            self.logger.set_error_and_log(f"{err_type}: {err_msg}")
        raise err_type(err_msg)

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
        self.options = dataclasses.replace(self.options, static_graph=True)
        self.logger._set_static_graph()
        if self.find_unused_parameters:
            warnings.warn(
                "You passed find_unused_parameters=true to DistributedDataParallel, `_set_static_graph` will detect "
                "unused parameters automatically, so you do not need to set find_unused_parameters=true, just be sure "
                "these unused parameters will not change during training loop while calling `_set_static_graph`.",
                stacklevel=2,
            )

    def _sync_buffers(self) -> None:
        """Synchronises buffers; graphs that saved them do not count it as a change, before torch 2.13 neither."""
        with torch.no_grad():
            source = self._find_common_rank(self._distributed_rank, True) if self._join_config.enable else 0
            self._assign_modules_buffers()
            with torch.autograd._unsafe_preserve_version_counter(tuple(self.modules_buffers)):
                self._sync_module_buffers(source)

    def _default_broadcast_coalesced(
        self, bufs: list[torch.Tensor] | None = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        """Gives all ranks the buffers of one; a backward pass that still needs old values keeps them."""
        buffers = self.modules_buffers if bufs is None else bufs
        size = self.broadcast_bucket_size if bucket_size is None else bucket_size
        broadcast_buffers(
            self.module,
            buffers,
            lambda tensors: self._distributed_broadcast_coalesced(tensors, size, authoritative_rank),
        )

    def _distributed_broadcast_coalesced(
        self, tensors: list[torch.Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        """Gives all ranks the tensors of one, of any dtype and layout, in place."""
        broadcast(self.process_group, tensors, buffer_size, authoritative_rank)

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        """Gives all ranks the model of the last one that joined."""
        self._authoritative_rank = self._find_common_rank(self._distributed_rank, is_last_joiner)
        self._send_module(self._authoritative_rank, buffers=self.forward_sync_buffers)

    def _match_all_reduce_for_bwd_pass(self) -> None:
        """Takes part in a backward pass of ranks that still have inputs, with zeros."""
        self.reducer.shadow_backward()

    def _match_unused_params_allreduce(self) -> None:
        """Called after it, with `find_unused_parameters`: the pass itself has told the ranks already."""

    def _post_forward(self, output: Any) -> Any:
        output = super()._post_forward(output)
        self._clear_grad_buffer()
        return output

    def _clear_grad_buffer(self) -> None:
        """Called at the end of each forward: delayed parameters have buckets like others, nothing is to be cleared."""

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Trains on with other ranks; buckets are rebuilt. Comm hooks with groups of their own are the caller's."""
        self._has_rebuilt_buckets = False
        self.reducer._reset_state()
        if not _rank_not_in_group(new_process_group):
            self.process_group = new_process_group
            self._progress.restart()
            self._control.connect_anew()
            self.reducer._update_process_group(new_process_group)

    def _reduced(self) -> dict[str, tuple[nn.Parameter, bool]]:
        """Asks `_build_params_for_reducer`, which subclasses may override, what is to be reduced."""
        names = {param: name for name, param in self.module.named_parameters()}
        params, sparse = self._build_params_for_reducer()
        foreign = [f"{i}, of shape {tuple(p.shape)}," for i, p in enumerate(params) if p not in names]
        if foreign:
            raise ValueError(
                f"_build_params_for_reducer of {type(self).__name__} returned parameters of no part of the wrapped "
                f"module: number {' and '.join(foreign)} cannot be reduced with it"
            )
        return {names[p]: (p, is_sparse) for p, is_sparse in zip(params, sparse, strict=True)}

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """Returns the parameters to reduce and, for each, whether its gradient is sparse."""
        found = super()._reduced()
        self._assign_modules_buffers()
        return [p for p, _ in found.values()], [sparse for _, sparse in found.values()]

    def _passing_sync_batchnorm_handle(self, module: nn.Module) -> None:
        """Makes SyncBatchNorm layers ours where torch has no implementation of them."""
        if self.device_type == "cpu":
            adopt_sync_batchnorm(module)
