"""After a failed collective: which ranks did not arrive at it, told through a key-value store.

A collective that fails tells which connection broke or that time ran out, not which rank stayed away. Each rank whose
wait fails therefore leaves a sign of where it is, and reads the others'. Nothing is written while all goes well.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Protocol

from unified_ddp.ranks.texts import ranks_text

GRACE_SECONDS = 5.0
"""How long the other ranks' signs are waited for; ranks that wait in one collective fail within moments."""

_POLL_SECONDS = 0.05


class KeyValueStore(Protocol):
    """What all ranks can write to and read from, also when their collectives fail."""

    def set(self, key: str, value: str) -> None:
        """Writes, over what was there."""

    def get(self, key: str) -> str | None:
        """Returns what is there now, or None; does not wait."""


@dataclass(frozen=True)
class Sign:
    """Where a rank was when a wait of its failed, or when it raised.

    Attributes:
        phase: which collectives it took part in, the same words on every rank: "synchronising backward pass 3".
        detail: which of them, and what it carried.
        state: how far it had come.
        error: what it met there.
        at: when, in seconds since the epoch.
    """

    phase: str
    detail: str
    state: str
    error: str
    at: float


class RollCall:
    """The ranks of one wrapper.

    Args:
        store: shared by all ranks.
        rank: this one.
        world_size: number of ranks.
        name: of the wrapper, the same on every rank.
        grace: seconds to wait for the others' signs.
        sleep: waits between two looks; for tests.
    """

    def __init__(
        self,
        store: KeyValueStore,
        rank: int,
        world_size: int,
        name: str,
        grace: float = GRACE_SECONDS,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._prefix = f"unified_ddp/roll_call/{name}"
        self._grace = grace
        self._sleep = sleep

    def leave(self, sign: Sign) -> None:
        """Leaves this rank's sign; a store that cannot be reached any more is no further error."""
        try:
            self._store.set(f"{self._prefix}/{self._rank}", json.dumps(asdict(sign)))
        except Exception:
            return

    def read(self, since: float) -> dict[int, Sign | None] | None:
        """Returns the other ranks' signs; waits for those that left none since the time `since`, up to the grace.

        None means that the store cannot be reached.
        """
        deadline = time.monotonic() + self._grace
        while True:
            signs = self.look()
            if signs is None or time.monotonic() >= deadline:
                return signs
            if all(sign is not None and sign.at >= since for sign in signs.values()):
                return signs
            self._sleep(_POLL_SECONDS)

    def look(self) -> dict[int, Sign | None] | None:
        """Returns the other ranks' signs that are there now; None means that the store cannot be reached."""
        signs: dict[int, Sign | None] = {}
        for rank in (r for r in range(self._world_size) if r != self._rank):
            try:
                text = self._store.get(f"{self._prefix}/{rank}")
            except Exception:
                return None
            signs[rank] = Sign(**json.loads(text)) if text is not None else None
        return signs

    def explain(self, mine: Sign, signs: dict[int, Sign | None] | None) -> str:
        """Returns the message: what failed on this rank, which ranks did not arrive, and what each is known to do."""
        lines = [f"rank {self._rank} was here {mine.state}: {mine.error}"]
        if signs is None:
            why = "; which rank did not arrive is not known"
            lines.append(
                "the store in which ranks leave signs of themselves cannot be reached: the process that hosts it, "
                "rank 0 or the launcher, has probably died or ended"
            )
        else:
            away = [r for r, sign in signs.items() if sign is None or sign.phase != mine.phase]
            why = f", and {ranks_text(away)} did not arrive there" if away else ", though every rank arrived there"
            lines += [self._describe(rank, sign, mine) for rank, sign in signs.items()]
        lines.append(
            "Every rank must run the same synchronising forwards and backward passes: look for an exception, a skipped "
            "step, no_sync on some ranks only, a shorter data set (see join), or work longer than the timeout on the "
            "ranks named. Gradients of this pass are not reduced; start again from a checkpoint"
        )
        return "\n".join([f"{mine.phase}, {mine.detail}, failed on rank {self._rank}{why}.", *lines])

    def _describe(self, rank: int, sign: Sign | None, mine: Sign) -> str:
        if sign is None:
            return f"rank {rank} gave no sign within {self._grace:g} s: it died, ended, stalls or works elsewhere"
        if sign.phase == mine.phase:
            return f"rank {rank} waited for the same: {sign.detail}"
        when = f"{max(mine.at - sign.at, 0.0):.1f} s before"
        return f"rank {rank}, {when}, was in {sign.phase} ({sign.detail}) {sign.state}: {sign.error}"
