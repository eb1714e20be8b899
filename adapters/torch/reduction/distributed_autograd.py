"""Gradients under `torch.distributed.autograd.backward`, which keeps them in a context instead of in `.grad`.

Its engine does not run the nodes that accumulate gradients, nor hooks on parameters; it calls the hooks of those nodes.
"""

import weakref
from collections.abc import Callable, Sequence

import torch
from torch.autograd.graph import Node

from unified_ddp.weak import weak_call


def is_in_use() -> bool:
    """Says whether an RPC agent runs in this process, without which there are no contexts."""
    rpc = torch.distributed.rpc
    return rpc.is_available() and rpc.api._is_current_rpc_agent_set()


def current_context() -> int | None:
    """Returns the id of this thread's context; a forward has one, the engine's threads in its backward pass do not."""
    try:
        return torch.distributed.autograd._current_context()._context_id()
    except RuntimeError:
        return None


def context_gradients(context: int) -> dict[torch.Tensor, torch.Tensor]:
    """Returns the gradients accumulated so far in a context; writing into them changes the context's."""
    return torch.distributed.autograd.get_gradients(context)


class Contexts:
    """Follows distributed autograd, from the first forward in which it is in use.

    Args:
        nodes: that accumulate the parameters' gradients.
        ran: called with a parameter's number and the context's id, or None, after its gradient was accumulated, in
            `.grad` or in the context of the last forward; keeps nothing alive.
    """

    def __init__(self, nodes: Sequence[Node], ran: Callable[[int, int | None], None]) -> None:
        self._nodes = nodes
        self._ran = ran
        self._context: int | None = None
        self._is_hooked = False

    def enter(self) -> None:
        """Hears of a forward."""
        if not is_in_use():
            return
        self._context = current_context()
        if not self._is_hooked:
            self._is_hooked = True
            call = weak_call(self._node_ran)
            handles = [node.register_hook(lambda *_, i=i: call(i)) for i, node in enumerate(self._nodes)]
            for handle in handles:
                weakref.finalize(self, handle.remove)

    def _node_ran(self, param: int) -> None:
        self._ran(param, self._context)
