"""What the core needs of a process group. Adapters implement it over torch.distributed or over JAX processes."""

from typing import Any, Protocol

__all__ = ["Gathering", "Transport", "Work"]


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> Any:
        """Returns when the result may be used: after completion on CPUs, in stream order on GPUs."""


class Gathering(Protocol):
    """What every rank knows of the others: small things, gathered now and then."""

    def all_gather_ints(self, value: int) -> list[int]:
        """Returns every rank's unsigned 64-bit `value`, by rank."""

    def all_gather_text(self, text: str) -> list[str]:
        """Returns every rank's `text`, by rank; lengths may differ."""


class Transport(Gathering, Protocol):
    """Collectives over the ranks that train together. Every rank calls the same ones in the same order."""

    @property
    def rank(self) -> int:
        """This process's rank, from 0."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    def all_reduce(self, storage: Any) -> Work:
        """Starts summing `storage`, a flat array of the framework, in place over all ranks."""
