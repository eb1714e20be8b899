"""The constructor's arguments: checked, resolved, or refused with their names and values."""

import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _get_device_index
from torch.distributed.distributed_c10d import _get_default_group

from unified_ddp.plan import DEFAULT_BUCKET_CAP_MB, DEFAULT_FIRST_BUCKET_BYTES, MIB, bucket_caps
from unified_ddp.torch.reduction.scaling import REDUCTIONS

__all__ = [
    "BucketCaps",
    "Placement",
    "check_delayed",
    "check_every",
    "check_parameters",
    "check_reduction_name",
    "resolve_buffer_sync",
    "resolve_group",
    "use_side_stream",
    "warn_deprecated",
]


def check_delayed(
    module: nn.Module, delayed: Sequence[tuple[str, nn.Parameter]] | None, trigger: nn.Parameter | None
) -> dict[str, nn.Parameter]:
    """Returns the delayed parameters by name.

    Raises:
        ValueError: only one of the two arguments was given, or a parameter is not the module's.
    """
    if (delayed is not None) != (trigger is not None):
        raise ValueError("delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time.")
    found = dict(delayed or ())
    known = dict(module.named_parameters(remove_duplicate=False))
    for name, param in found.items():
        if known.get(name) is not param:
            raise ValueError(f"delay_all_reduce_named_params names {name!r}, which is no parameter of the module")
    if trigger is not None and not any(trigger is p for p in known.values()):
        raise ValueError("param_to_hook_all_reduce is no parameter of the module")
    return found


@dataclass(frozen=True)
class BucketCaps:
    """Bucket caps in bytes."""

    largest: int
    first: int
    per_bucket: tuple[int, ...]

    @classmethod
    def from_arguments(cls, bucket_cap_mb: float | None, bucket_cap_mb_list: Sequence[float] | None) -> "BucketCaps":
        """Resolves `bucket_cap_mb` and `bucket_cap_mb_list`, in MiB.

        Raises:
            TypeError, ValueError: with the value that cannot be a cap.
        """
        if bucket_cap_mb_list is not None:
            caps = tuple(bucket_caps(bucket_cap_mb_list=bucket_cap_mb_list))
            return cls(max(caps), max(caps), caps)
        if bucket_cap_mb is not None:
            cap = bucket_caps(bucket_cap_mb)[0]
            return cls(cap, cap, ())
        return cls(DEFAULT_BUCKET_CAP_MB * MIB, DEFAULT_FIRST_BUCKET_BYTES, ())

    @property
    def is_default(self) -> bool:
        """Whether neither argument was given."""
        return self.first < self.largest

    def initial(self, static_graph: bool, find_unused: bool) -> tuple[int, ...]:
        """Caps of the first iteration's buckets, before an order was observed.

        Registration order may not be the order in which gradients come, and a bucket launched too early could meet
        another collective of the model's own; so there is one bucket for each dtype, unless the buckets are never
        rebuilt.
        """
        if self.per_bucket:
            return self.per_bucket
        if static_graph or not find_unused:
            return (sys.maxsize,)
        return (self.first, self.largest) if self.is_default else (self.largest,)

    def rebuilt(self) -> tuple[int, ...]:
        """Caps of the rebuilt buckets."""
        return self.per_bucket or (self.first, self.largest)


def resolve_group(
    module: nn.Module, process_group: dist.ProcessGroup | None, device_mesh: Any
) -> tuple[dist.ProcessGroup, Any]:
    """Returns the process group, and the mesh it came from, if any."""
    if device_mesh is None:
        return process_group if process_group is not None else _get_default_group(), None
    if process_group is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
    if device_mesh._get_root_mesh() != device_mesh:
        # a slice of a larger mesh: tensor-parallel parameters become local tensors, as torch's class has it
        from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

        _pre_dp_module_transform(module)
    return device_mesh.get_group(mesh_dim=0), device_mesh


def check_parameters(parameters: Sequence[nn.Parameter]) -> None:
    """Refuses modules without a trainable parameter, and lazy ones that were never run."""
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in parameters):
        raise RuntimeError(
            "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. "
            "Run a dummy forward pass to correctly initialize the modules"
        )
    if not any(p.requires_grad for p in parameters):
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
        )


@dataclass(frozen=True)
class Placement:
    """Where the module, its inputs and its outputs are."""

    device: torch.device
    multi_device: bool
    device_ids: list[int] | None
    output_device: int | None

    @classmethod
    def of(
        cls,
        parameters: Sequence[nn.Parameter],
        device_ids: Sequence[int | torch.device] | None,
        output_device: int | torch.device | None,
    ) -> "Placement":
        """Resolves `device_ids` and `output_device` for a module with these parameters."""
        if device_ids is not None and len(device_ids) > 1:
            raise ValueError("device_ids can only be None or contain a single element.")
        types = {p.device.type for p in parameters}
        if len(types) != 1:
            raise ValueError(
                "DistributedDataParallel's input module must be on the same type of devices, "
                f"but input module parameters locate in {types}."
            )
        devices = {p.device for p in parameters}
        device = parameters[0].device
        multi = len(devices) > 1
        if device_ids and device.type != "cpu" and not multi:
            output = output_device if output_device is not None else device_ids[0]
            return cls(device, False, [_get_device_index(x, True) for x in device_ids], _get_device_index(output, True))
        if device_ids or output_device:
            raise ValueError(
                "DistributedDataParallel device_ids and output_device arguments only work with single-device/multiple-"
                f"device GPU modules or CPU modules, but got device_ids {device_ids}, output_device {output_device}, "
                f"and module parameters {devices}."
            )
        return cls(device, multi, None, None)


def resolve_buffer_sync(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> tuple[bool, bool]:
    """Returns whether buffers are synchronised before each forward, and whether at construction."""
    if broadcast_buffers is not None:
        if forward_sync_buffers is not None:
            text = (
                "Both `broadcast_buffers` and `forward_sync_buffers` were specified. `broadcast_buffers` is deprecated "
                "and its value is ignored when `forward_sync_buffers` is provided."
            )
        else:
            text = (
                "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead. It differs in one thing: with "
                "`forward_sync_buffers=False` buffers are still synchronised at construction."
            )
        warnings.warn(text, FutureWarning, stacklevel=3)
    if forward_sync_buffers is not None:
        return forward_sync_buffers, True
    sync = broadcast_buffers if broadcast_buffers is not None else True
    return sync, sync


def warn_deprecated(check_reduction: bool) -> None:
    """Warns of arguments without effect."""
    if check_reduction:
        warnings.warn(
            "The `check_reduction` argument in `DistributedDataParallel` module is deprecated. Please avoid using it.",
            FutureWarning,
            stacklevel=3,
        )


def check_reduction_name(reduction: str) -> str:
    """Returns `reduction`.

    Raises:
        ValueError: there is no such reduction.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is one of {', '.join(map(repr, REDUCTIONS))}, not {reduction!r}")
    return reduction


def check_every(check_replicas_every: int | None) -> int | None:
    """Returns `check_replicas_every`.

    Raises:
        TypeError, ValueError: it is neither None nor a positive integer.
    """
    if check_replicas_every is None:
        return None
    if isinstance(check_replicas_every, bool) or not isinstance(check_replicas_every, int):
        raise TypeError(f"check_replicas_every is a number of steps or None, not {check_replicas_every!r}")
    if check_replicas_every < 1:
        raise ValueError(f"check_replicas_every is a positive number of steps or None, not {check_replicas_every}")
    return check_replicas_every


def use_side_stream() -> bool:
    """Whether inputs are copied to the device on a stream of their own (PYTORCH_DDP_USE_SIDE_STREAM)."""
    return os.environ.get("PYTORCH_DDP_USE_SIDE_STREAM", "1") == "1"
