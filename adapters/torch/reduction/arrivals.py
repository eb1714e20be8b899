"""What is known, when a backward pass starts, of the gradients that will come in it."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from unified_ddp.torch.reduction import autograd

Arrival = bytes | None
"""One byte a parameter: 1 it comes exactly once, 0 it may come. None: nothing is known."""


class Arrivals:
    """Registers the hooks on parameters, and foretells which of them a backward pass will call.

    Args:
        params: in registration order.
        hook: returns what to call when the gradient of the parameter of this number was accumulated.
        delayed: numbers of parameters that are reduced at the end in any case.
        lowered: mixed precision lowers the parameters in each forward, and a backward pass reaches them through nodes
            of their own.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        hook: Callable[[int], Callable[[Any], None]],
        delayed: Collection[int],
        lowered: bool,
    ) -> None:
        self._params = params
        self._delayed = delayed
        self._lowered = lowered
        self._several_devices = len({p.device for p in params}) > 1
        # Holding the nodes keeps each on the stream that is current now.
        self.nodes = [autograd.accumulate_grad_node(p) for p in params]
        self.handles: list[Any] = [p.register_post_accumulate_grad_hook(hook(i)) for i, p in enumerate(params)]
        self._hook_ids = [handle.id for handle in self.handles]

    def expected(self, forwards: int) -> Arrival:
        """Returns, in a backward pass that has just started, what it will reach.

        Args:
            forwards: how many there were since the last reduction.
        """
        nodes = self.nodes
        if self._lowered:
            if forwards > 1:  # each lowered the parameters anew
                return None
            nodes = [autograd.accumulate_grad_node(p) for p in self._params]
        arrival = autograd.arrivals(nodes)
        return arrival if arrival is None else self._without_later_hooks(arrival)

    def counted_on(self, arrival: Arrival) -> Arrival:
        """Returns which of them buckets may wait for, and be launched then."""
        # With several devices, a bucket may become ready on the engine's thread for another one, whose streams are not
        # those that its gradients were made on; at the end of the pass the caller's streams have waited for all.
        if self._several_devices or arrival is None:
            return None
        return _without(arrival, self._delayed)

    def _without_later_hooks(self, arrival: bytes) -> bytes:
        """A parameter whose gradient other hooks change after ours has its final one only when the pass ends."""
        every = [p._post_accumulate_grad_hooks for p in self._params]
        later = {i for i, hooks in enumerate(every) if len(hooks) > 1 and next(reversed(hooks)) != self._hook_ids[i]}
        return _without(arrival, later)


def _without(arrival: bytes, uncertain: Collection[int]) -> bytes:
    return bytes(0 if i in uncertain else a for i, a in enumerate(arrival)) if uncertain else arrival
