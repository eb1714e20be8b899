"""Contexts of distributed autograd, followed without an RPC agent; the conformance run has real ones."""

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from unified_ddp.torch.reduction import distributed_autograd
from unified_ddp.torch.reduction.autograd import accumulate_grad_node
from unified_ddp.torch.reduction.distributed_autograd import Contexts


class Heard:
    def __init__(self) -> None:
        self.calls: list[tuple[int, int | None]] = []

    def __call__(self, param: int, context: int | None) -> None:
        self.calls.append((param, context))


def contexts(monkeypatch: pytest.MonkeyPatch, in_use: bool) -> tuple[list[nn.Parameter], Contexts, Heard]:
    monkeypatch.setattr(distributed_autograd, "is_in_use", lambda: in_use)
    params = [nn.Parameter(torch.randn(2)) for _ in range(2)]
    heard = Heard()
    return params, Contexts([accumulate_grad_node(p) for p in params], heard), heard


def use_context(monkeypatch: pytest.MonkeyPatch, context: Any) -> None:
    monkeypatch.setattr(distributed_autograd, "current_context", lambda: context)


def test_without_an_agent_nothing_is_hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not distributed_autograd.is_in_use()
    assert distributed_autograd.current_context() is None
    params, followed, heard = contexts(monkeypatch, in_use=False)
    followed.enter()
    params[0].sum().backward()
    assert heard.calls == []


def test_nodes_tell_the_context_of_the_last_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    params, followed, heard = contexts(monkeypatch, in_use=True)
    params[1].sum().backward()
    assert heard.calls == []  # before the first forward
    use_context(monkeypatch, 7)
    followed.enter()
    followed.enter()  # hooks once
    params[1].sum().backward()
    use_context(monkeypatch, None)
    followed.enter()
    params[0].sum().backward()
    assert heard.calls == [(1, 7), (0, None)]
    torch.autograd.grad(params[0].sum(), params[0])
    assert len(heard.calls) == 2


def test_the_gradient_is_there_when_its_node_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    params, _, _ = contexts(monkeypatch, in_use=True)
    grads: list[Any] = []
    followed = Contexts([accumulate_grad_node(p) for p in params], lambda i, _: grads.append(params[i].grad))
    followed.enter()
    params[1].sum().backward()
    assert grads == [params[1].grad]
    assert grads[0] is not None


def test_a_graph_keeps_nothing_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    params, followed, heard = contexts(monkeypatch, in_use=True)
    followed.enter()
    out = params[0].sum()
    gone = weakref.ref(followed)
    del followed
    assert gone() is None
    out.backward()
    assert heard.calls == []
