"""How far this rank has come in its wrapper's iterations, for errors that must name ranks."""

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from unified_ddp.errors import CommHookError, ReductionError, UnifiedDDPError
from unified_ddp.ranks.group import Group
from unified_ddp.ranks.roll_call import KeyValueStore, RollCall, Sign

_wrappers: dict[str, Iterator[int]] = defaultdict(itertools.count)


class Progress:
    """Counts this rank's passes, and turns the failure of a collective into an error that names the ranks.

    Args:
        group: the ranks.
        store: returns what they all can write to also when their collectives fail; None if there is nothing.
    """

    def __init__(self, group: Group, store: Callable[[], KeyValueStore | None]) -> None:
        self._group = group
        self._store = store
        self.wrapper = next(_wrappers[group.name])
        """Number of the wrapper among those on the same ranks."""
        self.forwards = 0
        self.local_forwards = 0
        self.backwards = 0
        self._exception_at: float | None = None
        self._has_failed = False
        self._since = self._started = time.time()

    def forward(self, sync: bool) -> None:
        """Counts a forward that records gradients."""
        self._exception_at, self._has_failed = None, False
        if sync:
            self.forwards += 1
        else:
            self.local_forwards += 1
        self._since, self._started = self._started, time.time()

    @property
    def pass_name(self) -> str:
        """The synchronising backward pass under way, in words that are the same on every rank."""
        return f"synchronising backward pass {self.backwards}"

    @property
    def forward_name(self) -> str:
        """The synchronising forward under way, in words that are the same on every rank."""
        return f"synchronising forward {self.forwards}"

    @property
    def _state(self) -> str:
        return (
            f"after {self.forwards} synchronising forwards, {self.local_forwards} under no_sync and {self.backwards} "
            "synchronising backward passes"
        )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._group.world_size

    @property
    def global_ranks(self) -> Sequence[int]:
        """Which ranks these are among all processes: what errors call them."""
        return self._group.global_ranks

    @property
    def global_rank(self) -> int:
        """This rank among all processes."""
        return self._group.global_ranks[self._group.rank]

    def gather(self, value: int) -> list[int]:
        """Returns every rank's `value`, over the ranks' own connections."""
        return self._group.all_gather_ints(value)

    def restart(self) -> None:
        """Counts from 0 again: the ranks are others now."""
        self.forwards = self.local_forwards = self.backwards = 0

    def unused_elsewhere(self, error: Exception) -> str:
        """Tells the other ranks of an error about unused parameters here, and returns what they say of themselves."""
        phase = f"the check of used parameters in {self.forward_name}"
        self.leave_sign(phase, "before anything was exchanged", error)
        lines = []
        for member, sign in self.other_signs().items():
            rank = self.global_ranks[member]
            if sign is not None and sign.phase == phase:
                lines += [line for line in sign.error.splitlines() if f"grad for rank {rank}: " in line][-1:]
            else:
                lines.append(
                    f"Rank {rank} raised no such error: it had a gradient for every parameter, or is elsewhere"
                )
        return "".join(f"\n{line}" for line in lines)

    def raised(self, error: BaseException) -> None:
        """Tells the other ranks, should they ask, of an exception that ended a backward pass here, or this process."""
        is_local = isinstance(error, CommHookError) or not isinstance(error, UnifiedDDPError)
        if is_local and not self._has_failed:
            sign = self.leave_sign(self._exception_phase, "which it did not reduce", error)
            self._exception_at = sign.at

    @property
    def _exception_phase(self) -> str:
        return f"an exception in {self.pass_name}"

    def require_pass_elsewhere(self) -> None:
        """Looks, in a wait that takes long, whether a rank has raised or failed in this pass: it will not go on.

        Raises:
            RuntimeError: one has.
        """
        self._require_none_in(self._exception_phase, "raised")
        self.require_elsewhere(self.pass_name)

    def require_elsewhere(self, phase: str) -> None:
        """Looks, in a wait that takes long, whether it failed on another rank, which has given up then.

        Args:
            phase: what is waited for, in words that are the same on every rank.

        Raises:
            RuntimeError: it did.
        """
        self._require_none_in(phase, "gave up waiting:")

    def _require_none_in(self, phase: str, met: str) -> None:
        call = self._roll_call()
        for rank, sign in ((call.look() if call is not None else None) or {}).items():
            if sign is not None and sign.phase == phase and sign.at >= self._since:
                raise RuntimeError(f"rank {self.global_ranks[rank]} {met} {sign.error}")

    @property
    def is_leaving(self) -> bool:
        """Whether the last that was heard is an exception, and other ranks may be waiting for this one."""
        return self._exception_at is not None and self._group.world_size > 1

    def others_know(self) -> bool:
        """Says whether every other rank has met the exception, or cannot be asked."""
        call = self._roll_call()
        signs = call.look() if call is not None else None
        at = self._exception_at or 0.0
        return signs is None or all(sign is not None and sign.at >= at for sign in signs.values())

    def leave_sign(self, phase: str, detail: str, error: BaseException) -> Sign:
        """Tells the other ranks, should they ask, what this one met."""
        sign = Sign(phase, detail, self._state, f"{type(error).__name__}: {error}", time.time())
        if (call := self._roll_call()) is not None:
            call.leave(sign)
        return sign

    def other_signs(self) -> dict[int, Sign | None]:
        """Returns what the other ranks left since the iteration before; waits a few seconds for them."""
        call = self._roll_call()
        return (call.read(self._since) if call is not None else None) or {}

    def failure(self, phase: str, detail: str, error: Exception) -> Exception:
        """Returns the error to raise for a collective that failed with `error`."""
        if isinstance(error, UnifiedDDPError):
            return error
        self._has_failed = True
        sign = self.leave_sign(phase, detail, error)
        call = self._roll_call()
        if call is None:
            return ReductionError(f"{phase}, {detail}, failed on rank {self.global_rank}: {error}")
        return ReductionError(call.explain(sign, call.read(self._since)))

    @contextmanager
    def waiting(self, phase: str, detail: str) -> Iterator[None]:
        """Names a wait on other ranks.

        Raises:
            ReductionError: it failed; says which ranks did not arrive.
        """
        try:
            yield
        except RuntimeError as error:
            raise self.failure(phase, detail, error) from error

    def _roll_call(self) -> RollCall | None:
        store = self._store() if self._group.world_size > 1 else None
        if store is None:
            return None
        group, name = self._group, f"wrapper {self.wrapper}"
        return RollCall(store, group.rank, group.world_size, name, ranks=group.global_ranks)
