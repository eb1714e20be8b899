"""The facts about torch's engine that the reduction relies on, and the ways out where it does not tell."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import MLP
from torch import nn
from torch.utils.checkpoint import checkpoint

from unified_ddp.torch.reduction import autograd


def three() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(3)) for _ in range(3)]


def in_pass(output: torch.Tensor, ask: Callable[[], Any], run: Callable[[], Any]) -> list[Any]:
    """Returns what was answered at the start of each backward pass through the output."""
    answers: list[Any] = []
    autograd.at_backward_start([output], lambda _grad: answers.append(ask()))
    run()
    return answers


def test_the_start_comes_before_any_gradient_is_used() -> None:
    a, b, _ = three()
    seen: list[str] = []
    middle = a * 2
    middle.register_hook(lambda grad: seen.append("middle"))
    first, second = middle.sum(), (middle * b).sum()
    for p in (a, b):
        p.register_post_accumulate_grad_hook(lambda _: seen.append("parameter"))
    autograd.at_backward_start([first, second, torch.ones(1)], lambda grad: seen.append("start"))
    (first + second).backward(retain_graph=True)
    assert seen == ["start", "parameter", "middle", "parameter"]
    seen.clear()
    second.backward()  # again, through one of them only
    assert seen == ["start", "parameter", "middle", "parameter"]


def test_no_start_without_a_graph() -> None:
    autograd.at_backward_start([torch.ones(1)], pytest.fail)
    autograd.at_backward_start([], pytest.fail)


def test_what_a_pass_will_reach() -> None:
    params = three()
    nodes = [autograd.accumulate_grad_node(p) for p in params]
    ask = lambda: autograd.arrivals(nodes)  # noqa: E731
    for used in ([0, 1], [2], [0, 1, 2]):
        out = sum(params[i].sum() for i in used)
        want = bytes(i in used for i in range(3))
        assert in_pass(out, ask, out.backward) == [want]
    out = params[0].sum() + params[1].sum()
    # of the leaves asked for, only those count; autograd.grad leaves every .grad alone
    assert in_pass(out, ask, lambda o=out: o.backward(inputs=[params[1]])) == [b"\0\1\0"]
    out = params[0].sum() + params[1].sum()
    assert in_pass(out, ask, lambda o=out: torch.autograd.grad(o, params[:2])) == [b"\0\0\0"]


def test_a_reentrant_pass_may_reach_what_is_not_told() -> None:
    weight = nn.Parameter(torch.randn(3))
    node = autograd.accumulate_grad_node(weight)
    out = checkpoint(lambda x: x * weight, torch.ones(3, requires_grad=True), use_reentrant=True).sum()
    assert in_pass(out, lambda: autograd.arrivals([node]), out.backward) == [b"\0"]
    assert weight.grad is not None


def test_the_node_of_a_parameter_is_one() -> None:
    (param,) = three()[:1]
    node = autograd.accumulate_grad_node(param)
    with torch.no_grad():
        assert autograd.accumulate_grad_node(param) is node
    with torch.inference_mode():
        assert autograd.accumulate_grad_node(param) is node
    assert node.name() == "torch::autograd::AccumulateGrad"


def test_whether_a_hook_on_a_parameter_comes_before_an_addition() -> None:
    (param,) = three()[:1]
    answers = []
    param.register_hook(lambda _: answers.append(autograd.accumulates(autograd.accumulate_grad_node(param))))
    param.sum().backward()
    torch.autograd.grad(param.sum(), param)
    assert answers == [True, False]


def test_which_pass_is_autograd_grad() -> None:
    model = MLP()
    x = torch.randn(2, 8, requires_grad=True)

    def run(how: Callable[[torch.Tensor], Any]) -> list[bool]:
        out = model(x).sum()
        return in_pass(out, autograd.is_autograd_grad, lambda: how(out))

    assert run(lambda out: out.backward()) == [False]
    assert run(lambda out: out.backward(create_graph=True)) == [False]
    assert run(lambda out: torch.autograd.grad(out, x)) == [True]
    assert run(lambda out: torch.autograd.grad(out, list(model.parameters()))) == [True]
    assert autograd.is_autograd_grad() is False  # no pass at all


def test_transformations_of_torch_func() -> None:
    made: list[bool] = []

    def inside(x: torch.Tensor) -> torch.Tensor:
        made.append(autograd.is_transformed(x))
        with autograd.outside_functorch():
            made.append(autograd.is_transformed(torch.ones(2) * 2))
        return (x * x).sum()

    assert torch.func.grad(inside)(torch.ones(2)).tolist() == [2, 2]
    assert made == [True, False]
    with autograd.outside_functorch():
        assert not autograd.is_transformed(torch.ones(2))


def test_the_end_comes_once_after_the_outermost_pass() -> None:
    weight = nn.Parameter(torch.randn(3))
    seen: list[Any] = []
    weight.register_post_accumulate_grad_hook(lambda _: seen.append("parameter"))
    x = torch.ones(3, requires_grad=True)
    inner = checkpoint(lambda x: x * weight, x * 2, use_reentrant=True)
    x.register_post_accumulate_grad_hook(lambda _: seen.append("input"))
    out = inner.sum()
    thread = threading.get_ident()

    def end() -> None:
        seen.append(("end", threading.get_ident() == thread, autograd.in_backward()))

    autograd.at_backward_start([out], lambda _grad: autograd.at_backward_end(end))
    out.backward()
    assert [s if isinstance(s, str) else s[:2] for s in seen] == ["parameter", "input", ("end", True)]


def test_an_exception_drops_the_end() -> None:
    (param,) = three()[:1]
    out = param.sum()
    autograd.at_backward_start([out], lambda _grad: autograd.at_backward_end(pytest.fail))

    def fail(_: Any) -> None:
        raise KeyError("on purpose")

    param.register_post_accumulate_grad_hook(fail)
    with pytest.raises(KeyError, match="on purpose"):
        out.backward()


def test_whether_a_pass_is_under_way() -> None:
    (param,) = three()[:1]
    out = param.sum()
    assert in_pass(out, autograd.in_backward, out.backward) == [True]
    assert not autograd.in_backward()


def test_where_the_engine_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autograd, "_will_execute", None)
    (param,) = three()[:1]
    node = autograd.accumulate_grad_node(param)
    out = param.sum()
    ask = lambda: (autograd.arrivals([node]), autograd.accumulates(node), autograd.is_autograd_grad())  # noqa: E731
    assert in_pass(out, ask, out.backward) == [(None, True, False)]


@pytest.mark.parametrize("name", ["_current_autograd_node", "_functorch.peek_interpreter_stack"])
def test_without_other_private_functions(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delattr(f"torch._C.{name}")
    with autograd.outside_functorch():
        assert not autograd.is_autograd_grad()
