"""What a user's training loop does after backward, as one function."""

from collections.abc import Callable
from typing import Any

from unified_ddp.equivalence.errors import EquivalenceError

Stepper = Callable[[], Any]


def stepper_of(made: Any) -> Stepper:
    """Returns a function that updates the parameters from their `.grad`.

    Args:
        made: an optimizer, an (optimizer, scheduler) pair, or such a function.

    Raises:
        EquivalenceError: it is none of these.
    """
    if isinstance(made, tuple) and len(made) == 2 and all(hasattr(part, "step") for part in made):
        optimizer, scheduler = made

        def step() -> None:
            optimizer.step()
            scheduler.step()

        return step
    if hasattr(made, "step"):
        return made.step
    if callable(made):
        return made
    raise EquivalenceError(
        f"optimizer= returned {type(made).__name__}; it takes the module and returns an optimizer, "
        "(optimizer, scheduler), or a function that clips, steps and schedules"
    )
