"""Gradients under `torch.distributed.autograd.backward`, which keeps them in a context instead of in `.grad`.

Its engine does not run the nodes that accumulate gradients, nor hooks on parameters; it calls the hooks of those nodes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import Node

__all__ = ["context_gradients", "current_context", "hook_nodes", "is_in_use"]


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


def hook_nodes(nodes: Sequence[Node], call: Callable[[int], None]) -> list[Any]:
    """Calls `call(i)` after node i's gradient was accumulated, in `.grad` or in a context. Returns handles."""

    def hook(index: int) -> Callable[..., None]:
        def run(*_: Any) -> None:
            call(index)

        return run

    return [node.register_hook(hook(i)) for i, node in enumerate(nodes)]
