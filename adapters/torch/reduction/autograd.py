"""What we ask of torch's autograd engine. Private torch functions are called here only, each with a way out.

Facts relied on (torch 2.11 to 2.13), each held by a test: a hook on an output runs before the first gradient of that
output is used; `_will_engine_execute_node` says, during a backward pass, whether a node will run in it; a callback
queued during a backward pass runs when it ends, on the thread that called it, and is dropped if it raises.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import Variable
from torch.autograd.graph import Node, register_multi_grad_hook

_will_execute: Callable[[Node], bool] | None = getattr(torch._C, "_will_engine_execute_node", None)


def accumulate_grad_node(param: torch.Tensor) -> Node:
    """Returns the node that adds to `param.grad`. Holding it keeps its stream: the one current at the first call."""
    with torch.inference_mode(False), torch.enable_grad():
        return param.view_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr,return-value]


def arrivals(nodes: Sequence[Node]) -> bytes | None:
    """Returns, during a backward pass, one byte a node: 1 it runs exactly once, 0 it may run in a reentrant one.

    Under `torch.autograd.grad` none runs. None means that the engine cannot tell.
    """
    if _will_execute is None:
        return None
    try:
        return bytes(map(_will_execute, nodes))
    except RuntimeError:  # torch.autograd.grad of one of them
        return bytes(len(nodes))


def accumulates(node: Node) -> bool:
    """Says, in a hook on a parameter, whether its `.grad` is about to be added to: not under `autograd.grad`."""
    if _will_execute is None:
        return True
    try:
        _will_execute(node)
    except RuntimeError:
        return False
    return True


def is_autograd_grad() -> bool:
    """Says, in a hook before a node runs, whether this is `torch.autograd.grad`, which leaves every `.grad` alone.

    A backward pass runs every leaf that the node leads to; one with `inputs=` may be taken for `autograd.grad`.
    """
    current = getattr(torch._C, "_current_autograd_node", lambda: None)()
    leaf = None if current is None else _first_leaf(current)
    return leaf is not None and arrivals([leaf]) == b"\0"


def _first_leaf(node: Node) -> Node | None:
    seen: set[Node] = set()
    stack = [node]
    while stack:
        node = stack.pop()
        if node.name() == "torch::autograd::AccumulateGrad":
            return node
        if node not in seen:
            seen.add(node)
            stack += [following for following, _ in node.next_functions if following is not None]
    return None


def outside_functorch() -> AbstractContextManager[Any]:
    """Encloses what is no part of the transformations of `torch.func` under way: they do not see its tensors."""
    peek = getattr(torch._C._functorch, "peek_interpreter_stack", lambda: None)
    return nullcontext() if peek() is None else temporarily_clear_interpreter_stack()


def is_transformed(tensor: torch.Tensor) -> bool:
    """Says whether the tensor was made inside a transformation of `torch.func`, which it ends with."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


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
