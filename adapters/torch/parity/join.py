"""Uneven inputs: what a rank does that has none left while others go on."""

from typing import Any

from torch.distributed.algorithms.join import JoinHook, _JoinConfig


class DDPJoinHook(JoinHook):
    """Mirrors the collectives of one iteration of the ranks that still have inputs.

    Args:
        ddp: the wrapper.
        divide_by_initial_world_size: divide gradients by all ranks; else by those that still have inputs.
    """

    def __init__(self, ddp: Any, divide_by_initial_world_size: bool) -> None:
        super().__init__()
        ddp.logger._set_uneven_input_join()
        ddp._divide_by_initial_world_size = divide_by_initial_world_size
        self.ddp = ddp

    def main_hook(self) -> None:
        """Shadows one forward and backward pass, collective by collective."""
        ddp = self.ddp
        reducer = ddp.reducer
        reducer.usage.next_iteration(reducer.transport.rank)
        reducer.rebuild_buckets()
        ddp._check_and_sync_module_buffers()
        syncs = ddp._check_global_requires_backward_grad_sync(is_joined_rank=True)
        if ddp._check_sync_bufs_post_fwd():
            ddp._sync_module_buffers(ddp._find_common_rank(reducer.transport.rank, False))
        ddp.require_forward_param_sync = syncs
        if syncs:
            ddp._match_all_reduce_for_bwd_pass()
            if ddp.find_unused_parameters:
                ddp._match_unused_params_allreduce()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Takes the model of the rank that joined last, and leaves the context: torch's `Join` does not tell us to."""
        self.ddp._sync_final_model(is_last_joiner)
        self.ddp._join_config = _JoinConfig.construct_disabled_join_config()
        self.ddp.reducer.scaling.divide_by_joined(None)
