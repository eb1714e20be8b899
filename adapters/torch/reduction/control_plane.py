"""The control plane's connections: a gloo group of the library's own, on hosts, whatever carries the gradients."""

import contextlib
import datetime
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from unified_ddp.torch.reduction.transport import ProcessGroupTransport, wait_watching

_DEFAULT_TIMEOUT = datetime.timedelta(minutes=30)

_planes: "weakref.WeakKeyDictionary[dist.ProcessGroup, GlooPlane | None]" = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class GatheredInts:
    """An all-gather of a few integers under way."""

    work: dist.Work
    rows: list[torch.Tensor]

    def result(self, look: Callable[[], None]) -> list[list[int]]:
        """Waits and returns every rank's integers; what `look` raises, now and then, ends the wait."""
        wait_watching(self.work, look)
        return [row.tolist() for row in self.rows]


class GlooPlane:
    """Connects the ranks of a process group once more, through its store.

    Args:
        store: of the group.
        rank: this one's, in the group.
        world_size: number of ranks.
        timeout: after which a wait fails.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: datetime.timedelta) -> None:
        own = dist.PrefixStore("unified_ddp/control_plane", store)
        self._group: Any = dist.ProcessGroupGloo(own, rank, world_size, timeout)
        self._world_size = world_size

    def start(self, values: Sequence[int]) -> GatheredInts:
        """Starts telling all ranks these integers."""
        mine = torch.tensor(values, dtype=torch.int64)
        rows = [torch.empty_like(mine) for _ in range(self._world_size)]
        return GatheredInts(self._group.allgather([rows], [mine]), rows)


def plane_of(transport: ProcessGroupTransport) -> GlooPlane | None:
    """Returns the one plane of a process group; None if it has one rank, or no store. All its ranks call this."""
    group = transport.group
    if group not in _planes:
        _planes[group] = _make(group, transport.device)
    return _planes[group]


def _make(group: dist.ProcessGroup, device: torch.device) -> GlooPlane | None:
    if group.size() == 1 or not dist.is_gloo_available():
        return None
    try:
        store = group.get_group_store()
    except (RuntimeError, AttributeError):
        return None  # made without one
    return GlooPlane(store, group.rank(), group.size(), _timeout(group, device))


def _timeout(group: Any, device: torch.device) -> datetime.timedelta:
    with contextlib.suppress(RuntimeError, AttributeError):
        return group._get_backend(device).options._timeout
    return _DEFAULT_TIMEOUT
