"""Comm hooks: how one bucket is reduced, and what is asked of a hook when it is registered."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from unified_ddp.errors import CommHookError
from unified_ddp.ranks.texts import shortened
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
        return DeferredReduction(self, bucket) if self.alone else FutureReduction(self, bucket, self.start(bucket))

    def start(self, bucket: GradBucket) -> torch.futures.Future:
        """Runs the hook on a bucket now and returns its future."""
        future = self.hook(self.state, bucket)
        if not isinstance(future, torch.futures.Future | torch._C.Future):
            raise CommHookError(
                f"{hook_name(self.hook)}: callback must return a torch.futures.Future object, but got "
                f"{type(future).__name__}. The comm hook returned that for bucket {bucket.index()}; it must return a "
                "torch.futures.Future that holds the reduced tensor"
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
    """What a comm hook returned for a bucket."""

    hook: CommHook
    bucket: GradBucket
    future: torch.futures.Future

    def result(self) -> torch.Tensor:
        """Waits (on GPUs: in stream order) and returns the tensor in the future, alone or in a list of one.

        Raises:
            CommHookError: there is none, or of a shape, dtype or device that the bucket's gradients cannot be taken of.
        """
        value = self.future.wait()
        if isinstance(value, list | tuple) and len(value) == 1:
            value = value[0]
        if not isinstance(value, torch.Tensor):
            raise self._wrong(type(value).__name__)
        param = self.bucket.parameters()[0]
        if (value.is_complex() and not param.is_complex()) or not (value.is_floating_point() or value.is_complex()):
            raise self._wrong(f"a tensor of dtype {value.dtype} for gradients of {param.dtype}")
        if value.layout != torch.strided and not self.bucket.is_sparse:
            raise self._wrong(f"a tensor of layout {value.layout}")
        if self.bucket.is_sparse and value.shape != param.shape:
            raise self._wrong(f"a tensor of shape {tuple(value.shape)} for a sparse gradient of {tuple(param.shape)}")
        if value.device.type == "meta":
            raise self._wrong("a tensor on the meta device, which has no values")
        return value

    def _wrong(self, what: str) -> CommHookError:
        return CommHookError(
            f"the future that the comm hook {hook_name(self.hook.hook)} returned for bucket {self.bucket.index()} "
            f"({shortened(self.bucket.names())}) holds {what}; it must hold one tensor shaped as bucket.buffer()"
        )


@dataclass(frozen=True)
class DeferredReduction:
    """A hook that runs when the result is asked for, and no other one meanwhile."""

    hook: CommHook
    bucket: GradBucket

    def result(self) -> torch.Tensor:
        """Runs the hook, waits and returns the tensor in its future."""
        return FutureReduction(self.hook, self.bucket, self.hook.start(self.bucket)).result()


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
