"""The ranks of a torch.distributed process group, whatever its backend: collectives, and the store beside them."""

import datetime
from collections.abc import Callable

import torch
import torch.distributed as dist

_PATIENCE = datetime.timedelta(seconds=1)


def wait_watching(work: dist.Work, look: Callable[[], None]) -> None:
    """Waits on the host for a gloo collective.

    Args:
        work: the collective.
        look: called every second of a wait; what it raises ends the wait.
    """
    while True:
        try:
            work.wait(_PATIENCE)
            return
        except RuntimeError:
            if work.is_completed():
                raise
        look()


class GroupStore:
    """The key-value store of a process group, which outlives its connections."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def set(self, key: str, value: str) -> None:
        """Writes."""
        self._store.set(key, value)

    def get(self, key: str) -> str | None:
        """Returns what is there, or None."""
        return self._store.get(key).decode() if self._store.check([key]) else None


class ProcessGroupTransport:
    """Collectives of one process group.

    Args:
        group: any torch.distributed process group: gloo, NCCL, or another backend.
        device: where small tensors of our own are made; the module's device.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device

    @property
    def name(self) -> str:
        """The group's name."""
        return self.group.group_name

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self.group.rank()

    @property
    def global_ranks(self) -> list[int]:
        """Which ranks these are among all processes, in the group's order; 0, 1, ... if torch does not know it."""
        try:
            return dist.get_process_group_ranks(self.group)
        except (KeyError, ValueError):
            return list(range(self.world_size))

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return self.group.size()

    def wait(self, work: dist.Work, look: Callable[[], None]) -> None:
        """Waits for a collective; on NCCL, makes the current stream wait.

        Args:
            work: the collective.
            look: called now and then, where the host waits; what it raises ends the wait.
        """
        if self.backend_name != dist.Backend.GLOO:
            work.wait()
            return
        wait_watching(work, look)

    def store(self) -> GroupStore | None:
        """Returns the group's store; None if it was made without one."""
        find = getattr(self.group, "get_group_store", None)
        try:
            return find and GroupStore(find())
        except RuntimeError:
            return None

    @property
    def backend_name(self) -> str:
        """The backend that carries tensors on the device: gloo, nccl, ...; a group may have one for each device."""
        return self.group._get_backend(self.device).name()

    @property
    def sums_sparse(self) -> bool:
        """Whether `all_reduce` takes sparse tensors."""
        return self.backend_name == dist.Backend.GLOO

    def all_reduce(self, storage: torch.Tensor) -> dist.Work:
        """Starts summing a tensor in place over all ranks; on NCCL this runs on the communication stream."""
        return self.group.allreduce([torch.view_as_real(storage) if storage.is_complex() else storage])

    def broadcast_ints(self, values: list[int], source: int = 0) -> list[int]:
        """Returns rank `source`'s integers; every rank gives as many."""
        tensor = torch.tensor(values, dtype=torch.int64, device=self.device)
        self.group.broadcast(tensor, source).wait()
        return tensor.tolist()

    def all_gather_ints(self, value: int) -> list[int]:
        """Returns every rank's unsigned 64-bit integer, by rank."""
        # torch has no collectives for uint64, and a float would lose bits: two halves of 32 bits each
        mine = torch.tensor([value >> 32, value & 0xFFFFFFFF], dtype=torch.int64, device=self.device)
        every = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(every, mine, group=self.group)
        return [(high << 32) | low for high, low in (t.tolist() for t in every)]

    def all_gather_text(self, text: str) -> list[str]:
        """Returns every rank's text, by rank."""
        # as bytes on our own device: torch's collectives of objects choose the device for themselves
        mine = torch.tensor(list(text.encode()), dtype=torch.uint8)
        sizes = self.all_gather_ints(mine.numel())
        padded = torch.nn.functional.pad(mine, (0, max(sizes) - mine.numel())).to(self.device)
        every = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(every, padded, group=self.group)
        return [bytes(t[:size].tolist()).decode() for t, size in zip(every, sizes, strict=True)]
