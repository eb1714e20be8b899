"""Subclasses that override members of torch's class: ours calls each of them where torch's does."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from conformance.api_coverage import LEFT_OUT
from support.models import ConvNet
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _BufferCommHookLocation

from unified_ddp.torch import DistributedDataParallel

_IN_CONSTRUCTION = {
    "_build_debug_param_to_name_mapping": "names come with the parameters",
    "_set_static_graph": "`static_graph` is an option from the start",
}
"""Members that torch's constructor calls, and ours does not."""

_QUESTIONS = {"_check_sync_bufs_pre_fwd", "_check_sync_bufs_post_fwd", "will_sync_module_buffers"}
"""Asked earlier, and more often, as ranks tell each other what a forward communicates."""


def overridable() -> list[str]:
    """Every function and property of torch's class."""
    return [n for n, m in vars(TorchDDP).items() if inspect.isfunction(m) or isinstance(m, property)]


def recording(base: type, calls: list[str]) -> type:
    """A subclass that overrides every member, and records its call."""

    def function(name: str) -> Any:
        def override(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return getattr(super(cls, self), name)(*args, **kwargs)

        return override

    def read(name: str) -> Any:
        def override(self: Any) -> Any:
            calls.append(name)
            return getattr(super(cls, self), name)

        return property(override, getattr(base, name).fset)

    kept = ("__init__", "broadcast_buffers")
    members = {n: read(n) if isinstance(vars(TorchDDP)[n], property) else function(n) for n in overridable()}
    cls: type = type("Recording", (base,), {n: m for n, m in members.items() if n not in kept})
    return cls


def steps(ddp: Any, rank: int) -> None:
    ddp(torch.randn(5, 64)).sum().backward()
    with ddp.no_sync():
        ddp(torch.randn(5, 64)).sum().backward()
    ddp(torch.randn(5, 64)).sum().backward()
    with torch.no_grad():
        ddp.eval()(torch.randn(5, 64))


def hooked(ddp: Any, rank: int) -> None:
    ddp.register_comm_hook(None, allreduce_hook)
    steps(ddp, rank)


def buffer_hook(ddp: Any, rank: int, where: str) -> None:
    ddp._register_buffer_comm_hook(ddp, lambda _state, _buffers: None, _BufferCommHookLocation[where])
    steps(ddp, rank)


def joined(ddp: Any, rank: int) -> None:
    with ddp.join():
        for _ in range(2 + rank):
            ddp(torch.randn(5, 64)).sum().backward()


PROGRAMS: dict[str, Callable[[Any, int], None]] = {
    "steps": steps,
    "comm hook": hooked,
    "buffer hook before": lambda ddp, rank: buffer_hook(ddp, rank, "PRE_FORWARD"),
    "buffer hook after": lambda ddp, rank: buffer_hook(ddp, rank, "POST_FORWARD"),
    "join": joined,
}


def called(rank: int, world_size: int, torchs: bool, program: str, options: dict[str, bool]) -> list[list[str]]:
    calls: list[str] = []
    ddp = recording(TorchDDP if torchs else DistributedDataParallel, calls)(ConvNet(), **options)
    constructing = list(calls)
    calls.clear()
    PROGRAMS[program](ddp, rank)
    return [constructing, list(calls)]


def missing(wanted: Sequence[str], had: Sequence[str]) -> str | None:
    """The first of `wanted` that does not follow, in this order, in `had`."""
    rest = iter(had)
    return next((name for name in wanted if name not in rest), None)


@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}])
@pytest.mark.parametrize("program", PROGRAMS)
def test_overrides_are_called_where_torchs_class_calls_them(
    world: Callable[[int], Any], program: str, options: dict[str, bool]
) -> None:
    left_out = {name.removeprefix("class.") for name in LEFT_OUT}
    theirs = world(2).run(called, torchs=True, program=program, options=options)
    ours = world(2).run(called, torchs=False, program=program, options=options)
    for (made, ran), (we_made, we_ran) in zip(theirs, ours, strict=True):
        assert set(made) - left_out - set(_IN_CONSTRUCTION) <= set(we_made)
        assert set(ran) & _QUESTIONS <= set(we_ran)
        wanted = [name for name in ran if name not in left_out | _QUESTIONS]
        assert missing(wanted, we_ran) is None, f"{wanted}\n{we_ran}"
