"""Comm hooks: how one bucket is reduced, and what is asked of a hook when it is registered."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from unified_ddp.torch.reduction.bucket import GradBucket

Hook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]


@dataclass(frozen=True)
class CommHook:
    """A registered hook and its state."""

    hook: Hook
    state: Any
    alone: bool = False
    """Reduce buckets one after the other, at the end of the backward pass."""

    def __call__(self, bucket: GradBucket) -> "FutureReduction | DeferredReduction":
        """Runs the hook on a bucket."""
        return DeferredReduction(self, bucket) if self.alone else FutureReduction(self.start(bucket))

    def start(self, bucket: GradBucket) -> torch.futures.Future:
        """Runs the hook on a bucket now and returns its future."""
        future = self.hook(self.state, bucket)
        if not isinstance(future, torch.futures.Future | torch._C.Future):
            raise TypeError(
                f"the comm hook {hook_name(self.hook)} returned {type(future).__name__} for bucket {bucket.index()}; "
                "it must return a torch.futures.Future that holds the reduced tensor"
            )
        return future


@dataclass(frozen=True)
class WorkReduction:
    """A collective in place on `storage`."""

    wait: Callable[[], None]
    storage: torch.Tensor

    def result(self) -> torch.Tensor:
        """Waits (NCCL: makes the current stream wait) and returns the storage."""
        self.wait()
        return self.storage


@dataclass(frozen=True)
class DenseReduction:
    """A sparse gradient summed as a dense tensor, where the backend sums no sparse ones (NCCL)."""

    wait: Callable[[], None]
    dense: torch.Tensor

    def result(self) -> torch.Tensor:
        """Waits as `WorkReduction` and returns the sum, sparse in the first dimension."""
        self.wait()
        return self.dense.to_sparse(1)


@dataclass(frozen=True)
class FutureReduction:
    """What a comm hook returned."""

    future: torch.futures.Future

    def result(self) -> torch.Tensor:
        """Waits (on GPUs: in stream order) and returns the tensor in the future, alone or in a list of one."""
        value = self.future.wait()
        if isinstance(value, list | tuple) and len(value) == 1:
            value = value[0]
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"a comm hook's future holds {type(value).__name__}; it must hold one tensor shaped as bucket.buffer()"
            )
        return value


@dataclass(frozen=True)
class DeferredReduction:
    """A hook that runs when the result is asked for, and no other one meanwhile."""

    hook: CommHook
    bucket: GradBucket

    def result(self) -> torch.Tensor:
        """Runs the hook, waits and returns the tensor in its future."""
        return FutureReduction(self.hook.start(self.bucket)).result()


def builtin_hook(kind: dist.BuiltinCommHookType, group: dist.ProcessGroup) -> CommHook:
    """Returns the hook for one of torch's built-in kinds."""
    hooks = {
        dist.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
        dist.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
    }
    return CommHook(hooks[kind], group)


def hook_name(hook: Any) -> str:
    """Returns the name that logs and errors give a hook; partials and callable objects have none of their own."""
    inner = getattr(hook, "func", hook)
    return getattr(inner, "__qualname__", type(inner).__qualname__)


def check_comm_hook(hook: Any) -> None:
    """Refuses what cannot be a comm hook `hook(state, bucket) -> Future[Tensor]`.

    Raises:
        TypeError: it is not callable, or does not take two positional arguments.
        ValueError: its annotations name another bucket or return type.
    """
    if not callable(hook):
        raise TypeError("Communication hook must be callable.")
    try:
        signature = inspect.signature(hook)
    except (TypeError, ValueError):
        return  # a builtin without a signature
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise TypeError(
            f"the comm hook {hook_name(hook)}{signature} must take two positional arguments, state and bucket"
        ) from error
    # Annotations may be strings, which are taken as they come: they cannot be resolved for every callable.
    given = [p.annotation for p in list(signature.parameters.values())[1:2] if p.kind is not p.VAR_POSITIONAL]
    if any(not isinstance(a, str) and a not in _BUCKETS for a in given):
        raise ValueError("Communication hook: bucket annotation should be dist.GradBucket.")
    if not isinstance(signature.return_annotation, str) and signature.return_annotation not in _RETURNS:
        raise ValueError("Communication hook: return annotation should be torch.futures.Future[torch.Tensor].")


_BUCKETS = (inspect.Parameter.empty, dist.GradBucket, GradBucket, Any)
_RETURNS = (inspect.Signature.empty, torch.futures.Future[torch.Tensor], torch.futures.Future, Any)
