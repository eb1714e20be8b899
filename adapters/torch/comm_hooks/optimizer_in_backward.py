"""The comm hook for `_apply_optimizer_in_backward`: parameters are stepped as soon as their bucket is reduced.

Torch's hook for it needs an accelerator, and on one does not order what it leaves in the bucket before its unpacking.
"""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from unified_ddp.torch.reduction import autograd


@dataclass(frozen=True)
class StepOptimizersState:
    """What the hook needs.

    Args:
        ddp_ref: a weak reference to the wrapper.
        stream: where optimizers run, beside the backward pass; None on CPUs.
    """

    ddp_ref: Any
    stream: torch.Stream | None

    @classmethod
    def on(cls, device: torch.device, ddp_ref: Any) -> "StepOptimizersState":
        """Makes the state for a module on `device`."""
        return cls(ddp_ref, None if device.type == "cpu" else torch.Stream(device))


def step_optimizers_hook(state: StepOptimizersState, bucket: dist.GradBucket) -> torch.futures.Future:
    """Averages a bucket, steps its parameters' `_in_backward_optimizers`, and drops their gradients at the end.

    As with torch's hook, no other comm hook can be registered beside it, and parameters without such an optimizer keep
    their averaged gradients.
    """
    ddp = state.ddp_ref()
    reduced = ddp.reducer._run_allreduce_hook(bucket)
    stepped = [p for p in bucket.parameters() if hasattr(p, "_in_backward_optimizers")]
    future: torch.futures.Future = torch.futures.Future(devices=[ddp.device] if state.stream else None)
    with state.stream or contextlib.nullcontext():
        reduced.wait()
        bucket.buffer().div_(ddp.process_group.size())
        for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if hasattr(param, "_in_backward_optimizers"):
                param.grad = grad
                for optimizer in param._in_backward_optimizers:
                    optimizer.step()
        future.set_result(bucket.buffer())  # whoever waits for it waits for the stream

    def drop_gradients() -> None:
        for param in stepped:
            param.grad = None

    # after the end of the pass, which was queued when it started and unpacks the buckets
    autograd.at_backward_end(drop_gradients)
    return future
