"""`_apply_optimizer_in_backward` on CPUs, where torch's comm hook fails, as it asks for an accelerator's streams."""

from typing import Any

import torch
import torch.distributed as dist

from unified_ddp.torch import _engine

__all__ = ["step_optimizers_hook"]


def step_optimizers_hook(ddp_ref: Any, bucket: dist.GradBucket) -> torch.futures.Future:
    """Averages a bucket, steps its parameters' `_in_backward_optimizers`, and drops their gradients at the end.

    As torch's hook: other comm hooks cannot be registered beside it, and parameters without such an optimizer keep
    their averaged gradients.

    Args:
        ddp_ref: a weak reference to the wrapper.
        bucket: one of its buckets.
    """
    ddp = ddp_ref()
    ddp.reducer._run_allreduce_hook(bucket).wait()
    buffer = bucket.buffer().div_(ddp.process_group.size())
    stepped = [p for p in bucket.parameters() if hasattr(p, "_in_backward_optimizers")]
    for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
        if hasattr(param, "_in_backward_optimizers"):
            param.grad = grad
            for optimizer in param._in_backward_optimizers:
                optimizer.step()

    def drop_gradients() -> None:
        for param in stepped:
            param.grad = None

    # after the end of the pass, which was queued when it started and unpacks the buckets
    _engine.at_backward_end(drop_gradients)
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(buffer)
    return future
