"""What the core needs of the ranks that train together. Adapters implement it, over torch.distributed or JAX."""

from typing import Protocol


class Gathering(Protocol):
    """What every rank knows of the others: small things, gathered now and then, by all in the same order."""

    def all_gather_ints(self, value: int) -> list[int]:
        """Returns every rank's unsigned 64-bit `value`, by rank."""

    def all_gather_text(self, text: str) -> list[str]:
        """Returns every rank's `text`, by rank; lengths may differ."""


class Group(Gathering, Protocol):
    """A group of ranks, and this one's place in it."""

    @property
    def name(self) -> str:
        """The group's, the same on every rank and no other group's."""

    @property
    def rank(self) -> int:
        """This process's rank, from 0."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
