"""Which parameters took part in an iteration, and what is said of those that did not.

An iteration is what lies between two synchronising forwards; it may hold several backward passes. The fragments of the
messages that name indices and flags are torch's, as users and their tests know them.
"""

from collections.abc import Iterable, Sequence

import torch.distributed as dist

from unified_ddp.errors import UnusedParameterError

__all__ = ["Coverage", "unused_message"]


class Coverage:
    """Parameters that got a gradient in the current iteration's synchronising backward passes."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.expected = set(range(count))
        self.covered: set[int] = set()
        self.backward_passes = 0

    def add(self, params: Iterable[int]) -> None:
        """Hears, at the end of a synchronising backward pass, who got a gradient in it."""
        self.backward_passes += 1
        if len(self.covered) < self._count:
            self.covered.update(params)

    def missing(self) -> list[int]:
        """Returns the parameters that should have got a gradient by now and did not."""
        if not self.backward_passes or len(self.covered) == self._count:
            return []
        return sorted(self.expected - self.covered)

    def next_iteration(self) -> None:
        """Starts anew."""
        if self.backward_passes:
            self.backward_passes = 0
            self.covered = set()


def unused_message(names: Sequence[str], missing: Sequence[int], rank: int, *, find_unused: bool, static: bool) -> str:
    """Returns what `UnusedParameterError` says."""
    head = "Expected to have finished reduction in the prior iteration before starting a new one. "
    if static:
        head += (
            "This error indicates that your training graph has changed in this iteration, e.g., one parameter is used "
            "in first iteration, but then got unused in the second iteration. this is not compatible with static_graph "
            "set to True."
        )
    elif find_unused:
        head += (
            "Since `find_unused_parameters=True` is enabled, parameters without a gradient are expected, but these "
            "were not found: make sure that all `forward` function outputs participate in calculating loss."
        )
    else:
        head += (
            "Some parameters were not used in producing the loss. Their gradients were reduced with zeros for this "
            "rank, so nothing differs between ranks, but nothing said that they might be unused. If they may be, say "
            "so by passing the keyword argument `find_unused_parameters=True` to DistributedDataParallel; if they "
            "should not be, make sure that all `forward` function outputs participate in calculating loss."
        )
    indices = " ".join(map(str, missing))
    tail = f"\nParameter indices which did not receive grad for rank {rank}: {indices}"
    tail += f"\nParameters which did not receive grad for rank {rank}: {', '.join(names[i] for i in missing)}"
    if dist.get_debug_level() == dist.DebugLevel.OFF:
        tail += (
            "\nIn addition, you can set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL "
            "to print out information about which particular parameters did not receive gradient on this rank."
        )
    return head + tail


def require_covered(
    coverage: Coverage, names: Sequence[str], rank: int, *, find_unused: bool = False, static: bool = False
) -> None:
    """Raises UnusedParameterError if the iteration that ends left an expected parameter without a gradient."""
    missing = coverage.missing()
    if missing:
        raise UnusedParameterError(unused_message(names, missing, rank, find_unused=find_unused, static=static))
