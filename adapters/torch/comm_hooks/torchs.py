"""Comm hooks of torch in versions that work on every backend, and the choice between torch's and ours.

`register_comm_hook` puts ours in the place of torch's where torch's fails; both have the same signature and state.
"""

import functools
import math
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    mixed_precision_hooks,
    powerSGD_hook,
    quantization_hooks,
)

from unified_ddp.torch.comm_hooks import zero as zero_hooks

Future = torch.futures.Future
Hook = Callable[..., Any]

_LEVELS = 255


class Quantized(NamedTuple):
    """A matrix in 8 bits, each row with a scale and a zero point of its own, shape (rows, 1)."""

    scale: torch.Tensor
    zero: torch.Tensor
    levels: torch.Tensor

    def values(self) -> torch.Tensor:
        """Returns the matrix, in float32."""
        return self.scale * (self.levels.float() - self.zero)


def quantize(matrix: torch.Tensor) -> Quantized:
    """Quantizes a float32 matrix by rows, as torch.ao.quantization's observers of unsigned 8 bits do."""
    low = matrix.amin(1, keepdim=True).clamp(max=0)
    high = matrix.amax(1, keepdim=True).clamp(min=0)
    scale = ((high - low) / _LEVELS).clamp(min=torch.finfo(torch.float32).eps)
    zero = (-torch.round(low / scale)).clamp(0, _LEVELS)
    return Quantized(scale, zero, (torch.round(matrix / scale) + zero).clamp(0, _LEVELS).to(torch.uint8))


def quantization_pertensor_hook(process_group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future:
    """Averages a bucket in 8 bits: one scale and zero point a bucket and rank.

    Each rank's gradient is off by at most half its scale, (largest - smallest value, zero included) / 255.
    """
    return _quantized_mean(process_group, bucket, None)


def quantization_perchannel_hook(
    process_group: dist.ProcessGroup | None, bucket: dist.GradBucket, bucket_size: int = 512
) -> Future:
    """Averages a bucket in 8 bits: one scale and zero point for each `bucket_size` elements and rank."""
    return _quantized_mean(process_group, bucket, bucket_size)


def _quantized_mean(process_group: dist.ProcessGroup | None, bucket: dist.GradBucket, channel: int | None) -> Future:
    """Sends what torch's hooks send, but takes the tensors it gave to all-gather, not the futures' values.

    The value of an all-gather's future has another form on each backend, which is what torch's hooks trip over on gloo.
    """
    group = process_group if process_group is not None else dist.group.WORLD
    assert group is not None
    buffer = bucket.buffer()
    flat = (torch.view_as_real(buffer).reshape(-1) if buffer.is_complex() else buffer).float()
    width = channel or max(flat.numel(), 1)
    channels = torch.nn.functional.pad(flat, (0, -flat.numel() % width)).view(-1, width)
    mine = quantize(channels)
    everybodys = [[torch.empty_like(tensor) for _ in range(group.size())] for tensor in mine]
    *earlier, last = [
        dist.all_gather(into, tensor, group=group, async_op=True).get_future()
        for into, tensor in zip(everybodys, mine, strict=True)
    ]

    def mean(done: Future) -> torch.Tensor:
        for future in (*earlier, done):  # the earlier ones are being carried out; on GPUs, this orders the streams
            future.wait()
        total = torch.zeros_like(channels)
        for rank in range(group.size()):
            total += Quantized(*(tensors[rank] for tensors in everybodys)).values()
        result = total.view(-1)[: flat.numel()] / group.size()
        result = torch.view_as_complex(result.view(-1, 2)) if buffer.is_complex() else result
        return result.to(buffer.dtype)

    return last.then(mean)


def _orthogonalize(matrices: torch.Tensor, epsilon: float = 0) -> None:
    powerSGD_hook._orthogonalize(matrices if matrices.dim() == 3 else matrices.unsqueeze(0), epsilon)


# torch 2.13's function hands one matrix to a helper that takes a batch of them; everything else in it is right.
_batched = types.FunctionType(
    powerSGD_hook.batched_powerSGD_hook.__code__,
    vars(powerSGD_hook) | {"_orthogonalize": _orthogonalize},
    "batched_powerSGD_hook",
)


def batched_powerSGD_hook(state: powerSGD_hook.PowerSGDState, bucket: dist.GradBucket) -> Future:
    """PowerSGD on a bucket as one square matrix: torch's hook, without the error that ends it in torch 2.13.

    Raises:
        ValueError: `state.matrix_approximation_rank` is larger than the matrix.
    """
    side = math.ceil(math.sqrt(bucket.buffer().numel()))
    if state.matrix_approximation_rank > side:
        raise ValueError(
            f"bucket {bucket.index()} makes a matrix of {side} x {side}, to which matrix_approximation_rank="
            f"{state.matrix_approximation_rank} is no approximation; give PowerSGDState at most {side}"
        )
    return _batched(state, bucket)


def _upcast(state: Any, bucket: dist.GradBucket) -> Future:
    """Averages; the wrapper's own mixed precision does the rest of what torch's hook for it does."""
    return default_hooks.allreduce_hook(state.ddp_weakref().process_group, bucket)


_EVERYWHERE: dict[Hook, Hook] = {
    powerSGD_hook.batched_powerSGD_hook: batched_powerSGD_hook,
    mixed_precision_hooks._reducer_allreduce_and_upcast_hook: _upcast,
}
_ON_GLOO: dict[Hook, Hook] = {
    quantization_hooks.quantization_pertensor_hook: quantization_pertensor_hook,
    quantization_hooks.quantization_perchannel_hook: quantization_perchannel_hook,
}


def working_hook(hook: Hook, backend: str) -> Hook:
    """Returns the hook, or ours in its place if it is one of torch's that fails on this backend.

    Raises:
        ValueError: such a hook is inside another callable, where it cannot be replaced.
    """
    broken = _EVERYWHERE | (_ON_GLOO if backend == dist.Backend.GLOO else {})
    if isinstance(hook, types.FunctionType) and hook in broken:
        return broken[hook]
    if isinstance(hook, functools.partial) and hook.func in broken:
        return functools.partial(broken[hook.func], *hook.args, **hook.keywords)
    for inner in _functions_in(hook):
        if inner in broken:
            name = inner.__name__
            raise ValueError(
                f"the comm hook holds torch's {name}, which fails on the {backend} backend; give it "
                f"unified_ddp.torch.comm_hooks.{name} instead, which has the same signature"
            )
    return hook


_COMMUNICATE_TWICE = {
    powerSGD_hook.__name__,
    zero_hooks.__name__,
    "torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook",
}


def must_run_alone(hook: Hook, backend: str) -> bool:
    """Says whether buckets are to be reduced one after the other, at the end of the backward pass.

    The callbacks of PowerSGD and of the overlapped ZeRO hooks wait for collectives of their own. On gloo callbacks run
    on the two threads that carry out collectives: two buckets' callbacks leave none for what they wait for.
    """
    if backend != dist.Backend.GLOO:
        return False
    ours = (batched_powerSGD_hook, _batched)
    return any(f.__module__ in _COMMUNICATE_TWICE or f in ours for f in _functions_in(hook))


def _functions_in(hook: Any, depth: int = 8) -> Iterator[types.FunctionType]:
    """Yields the Python functions that a hook is, binds, or closes over."""
    if depth == 0:
        return
    if isinstance(hook, functools.partial):
        yield from _functions_in(hook.func, depth - 1)
    elif isinstance(hook, types.FunctionType):
        yield hook
        for cell in hook.__closure__ or ():
            try:
                held = cell.cell_contents
            except ValueError:
                continue  # not assigned yet
            if isinstance(held, types.FunctionType | functools.partial):
                yield from _functions_in(held, depth - 1)
