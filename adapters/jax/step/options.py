"""What `train_step` is told beside the loss, the optimizer and the devices."""

import dataclasses
from typing import Any, Literal, get_args

Reduction = Literal["weighted_mean", "mean"]
BufferSync = Literal["broadcast", "mean"]
OnNonfinite = Literal["ignore", "skip", "raise"]

_KNOWN = {"reduction": Reduction, "buffer_sync": BufferSync, "on_nonfinite": OnNonfinite}
_OWN = ("donate", "max_in_flight", "timeout")
"""What each process may choose for itself."""


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """The options of `DistributedDataParallel.train_step`, which describes them.

    Raises:
        ValueError: one is none of the known ones, or two contradict each other.
    """

    has_aux: bool
    accumulate: int
    reduction: Reduction
    divide_by_initial_world_size: bool
    compute_dtype: Any
    buffer_sync: BufferSync
    on_nonfinite: OnNonfinite
    donate: bool
    max_in_flight: int | None
    timeout: float | None

    def __post_init__(self) -> None:
        for name, known in _KNOWN.items():
            if getattr(self, name) not in get_args(known):
                values = ", ".join(map(repr, get_args(known)))
                raise ValueError(f"{name} takes {values}, not {getattr(self, name)!r}")
        if not isinstance(self.accumulate, int) or self.accumulate < 1:
            raise ValueError(f"accumulate takes a number of microbatches, 1 or more, not {self.accumulate!r}")
        if self.donate and self.on_nonfinite == "raise":
            raise ValueError('donate=True gives the old state away, and on_nonfinite="raise" leaves no new one')

    def compared(self) -> dict[str, Any]:
        """Returns those that must be equal in all processes."""
        return {name: value for name, value in vars(self).items() if name not in _OWN}
