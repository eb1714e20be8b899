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

REDUCTIONS = ("mean", "sum", "weighted_mean")


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


@dataclass(frozen=True)
class Options:
    """What the constructor of DistributedDataParallel was told, checked and resolved; see there for each.

    Attributes:
        caps: from `bucket_cap_mb` and `bucket_cap_mb_list`.
        delayed: names of the parameters that are reduced apart from the buckets.
        sync_buffers_at_construction: whether rank 0's buffers are broadcast at construction, if anything is.
    """

    caps: BucketCaps
    delayed: frozenset[str]
    find_unused_parameters: bool
    gradient_as_bucket_view: bool
    static_graph: bool
    skip_all_reduce_unused_params: bool
    batched_grad_copy: bool
    mixed_precision: Any
    forward_sync_buffers: bool
    sync_buffers_at_construction: bool
    init_sync: bool
    reduction: str
    check_replicas_every: int | None
    check_gradients_every: int | None
    control_plane: bool

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"reduction is one of {', '.join(map(repr, REDUCTIONS))}, not {self.reduction!r}")
        check_every("check_replicas_every", self.check_replicas_every)
        check_every("check_gradients_every", self.check_gradients_every)

    @property
    def initial_caps(self) -> tuple[int, ...]:
        """Caps of the first iteration's buckets in bytes, before an order was observed.

        Registration order may not be the order in which gradients come, and a bucket launched too early could meet
        another collective of the model's own; so there is one bucket for each dtype, unless the buckets are never
        rebuilt.
        """
        if self.caps.per_bucket:
            return self.caps.per_bucket
        if self.static_graph or not self.find_unused_parameters:
            return (sys.maxsize,)
        return self.rebuilt_caps if self.caps.is_default else (self.caps.largest,)

    @property
    def rebuilt_caps(self) -> tuple[int, ...]:
        """Caps of the rebuilt buckets in bytes."""
        return self.caps.per_bucket or (self.caps.first, self.caps.largest)

    def compared(self) -> dict[str, Any]:
        """Returns what ranks must have been told alike, in words for errors; JSON-able."""
        return {
            "find_unused_parameters": self.find_unused_parameters,
            "static_graph": self.static_graph,
            "forward_sync_buffers": self.forward_sync_buffers,
            "sync buffers at construction": self.sync_buffers_at_construction,
            "skip_all_reduce_unused_params": self.skip_all_reduce_unused_params,
            "mixed_precision": None if self.mixed_precision is None else repr(self.mixed_precision),
            "delay_all_reduce_named_params": sorted(self.delayed),
            "reduction": self.reduction,
            "check_replicas_every": self.check_replicas_every,
            "check_gradients_every": self.check_gradients_every,
            "control_plane": self.control_plane,
            "bucket caps in bytes": [self.caps.largest, *self.caps.per_bucket],
        }


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


def check_every(argument: str, every: int | None) -> None:
    """Raises TypeError or ValueError, naming the argument, if `every` is neither None nor a positive integer."""
    if every is None:
        return
    if isinstance(every, bool) or not isinstance(every, int):
        raise TypeError(f"{argument} is a number of steps or None, not {every!r}")
    if every < 1:
        raise ValueError(f"{argument} is a positive number of steps or None, not {every}")


def use_side_stream() -> bool:
    """Whether inputs are copied to the device on a stream of their own (PYTORCH_DDP_USE_SIDE_STREAM)."""
    return os.environ.get("PYTORCH_DDP_USE_SIDE_STREAM", "1") == "1"
