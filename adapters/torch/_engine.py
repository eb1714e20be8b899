"""What we ask of torch's autograd engine. Private torch functions are called here only, each with a way out.

Facts relied on (torch 2.11 to 2.13), each held by a test: a hook on an output runs before the first gradient of that
output is used; `_will_engine_execute_node` says, during a backward pass, whether a node will run in it; a callback
queued during a backward pass runs when it ends, on the thread that called it, and is dropped if it raises.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import Node, register_multi_grad_hook

_will_execute: Callable[[Node], bool] | None = getattr(torch._C, "_will_engine_execute_node", None)


def accumulate_grad_node(param: torch.Tensor) -> Node:
    """Returns the node that adds to `param.grad`. Holding it keeps its stream: the one current at the first call."""
    with torch.enable_grad():
        return param.view_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr,return-value]


def arrivals(nodes: Sequence[Node]) -> bytes | None:
    """Returns, during a backward pass, one byte a node: 1 it runs exactly once, 0 it may run in a reentrant one.

    None means that nothing is known: the engine cannot tell, or this is `torch.autograd.grad` of a parameter.
    """
    if _will_execute is None:
        return None
    try:
        return bytes(map(_will_execute, nodes))
    except RuntimeError:
        return None


def accumulates(node: Node) -> bool:
    """Says, in a hook on a parameter, whether its `.grad` is about to be added to: not under `autograd.grad`."""
    return _will_execute is None or bool(arrivals([node]))


def at_backward_start(outputs: Iterable[torch.Tensor], call: Callable[[Any], None]) -> None:
    """Calls `call(grad)` once in each backward pass through any of `outputs`, before their gradients are used."""
    tensors = [t for t in outputs if t.requires_grad]
    if tensors:
        register_multi_grad_hook(tensors, call, mode="any")


def at_backward_end(call: Callable[[], None]) -> None:
    """Calls `call()` when the backward pass under way ends; must be called from a hook inside it."""
    Variable._execution_engine.queue_callback(call)


def in_backward() -> bool:
    """Says whether this thread is inside a backward pass."""
    return torch._C._current_graph_task_id() != -1
