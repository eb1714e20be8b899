"""A pass: one reduction of all buckets, and what is known of it."""

import enum
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from unified_ddp.plan import BucketPlan


class Reduction(Protocol):
    """The reduction of one bucket under way."""

    def result(self) -> Any:
        """Waits (on GPUs: in stream order) and returns the reduced storage."""


class Counting(Protocol):
    """The ranks' answers to which parameters they used, under way."""

    def wait(self) -> None:
        """Waits (on GPUs: in stream order)."""

    def result(self) -> list[int]:
        """Waits and returns, by parameter, on how many ranks it was used."""


class PassKind(enum.Enum):
    """Where the gradients of a pass come from."""

    BACKWARD = "a synchronising backward pass"
    ACCUMULATED = "what is there already, outside a backward pass"
    SHADOW = "nowhere: this rank has no inputs left and takes part with zeros"


@dataclass(slots=True, weakref_slot=True)
class Forward:
    """A forward, by which ranks tell passes through its outputs from those through others'."""

    is_sync: bool = True
    """Whether a backward pass through its outputs is to be reduced."""
    number: int = 0
    """Among the forwards that a pass followed, from 1; 0 if none did yet."""
    passes: int = 0


@dataclass(slots=True)
class BucketState:
    """What is known of one bucket in one pass; parameters by their position in it."""

    is_packed: bool = False
    packed: set[int] = field(default_factory=set)
    """Packed one by one, before the others."""
    absent: set[int] = field(default_factory=set)
    """Packed without a gradient on this rank."""
    lent: set[int] = field(default_factory=set)
    """Those of the absent that got a gradient from other ranks."""


class Pass:
    """One reduction of all buckets, from its start to its end or abort.

    Args:
        number: from 1; the same on every rank.
        kind: where its gradients come from.
        plan: the buckets.
    """

    def __init__(self, number: int, kind: PassKind, plan: BucketPlan) -> None:
        self.number = number
        self.kind = kind
        self.plan = plan
        self.buckets = [BucketState() for _ in plan.buckets]
        self.order: tuple[int, ...] = ()
        """Parameters in the order of their first gradients, once it is finished."""
        self.used: Sequence[bool] | None = None
        """By parameter, whether this rank says that it used it; None if ranks do not tell each other."""
        self.counting: Counting | None = None
        self.origin: Forward | None = None
        """The forward whose outputs it passed first."""
        self.is_announced = False
        self.is_settled = False
        self._counts: list[int] | None = None
        self.launched = 0
        """Number of buckets whose reduction was started; those that no rank used may be left out."""
        self.in_flight: deque[tuple[int, Reduction]] = deque()

    @property
    def lent(self) -> list[int]:
        """Parameters without a gradient here that got one from other ranks."""
        pairs = zip(self.plan.buckets, self.buckets, strict=True)
        return [spec.params[position] for spec, bucket in pairs for position in bucket.lent]

    @property
    def held(self) -> Iterable[int]:
        """Parameters whose gradients were packed."""
        for spec, bucket in zip(self.plan.buckets, self.buckets, strict=True):
            for position, param in enumerate(spec.params):
                if bucket.is_packed or position in bucket.packed:
                    yield param

    def counts(self) -> list[int]:
        """Waits and returns, by parameter, on how many ranks it was used; the exchange must have been started."""
        if self._counts is None:
            assert self.counting is not None
            self._counts = self.counting.result()
        return self._counts
