"""What is foretold of the gradients of a backward pass."""

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import nn

from unified_ddp.torch.reduction import autograd
from unified_ddp.torch.reduction.arrivals import Arrivals


def params_on(*devices: str) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(3, device=device)) for device in devices]


def arrivals_of(
    params: list[nn.Parameter], delayed: Collection[int] = (), lowered: bool = False
) -> tuple[Arrivals, list[int]]:
    came: list[int] = []
    return Arrivals(params, lambda i: lambda _: came.append(i), delayed, lowered), came


def expected(arrivals: Arrivals, output: torch.Tensor, forwards: int = 1, run: Callable[[], Any] | None = None) -> Any:
    answers: list[Any] = []
    autograd.at_backward_start([output], lambda _grad: answers.append(arrivals.expected(forwards)))
    (run or output.backward)()
    (answer,) = answers
    return answer


def test_hooks_are_called_with_the_number_of_their_parameter() -> None:
    params = params_on("cpu", "cpu", "cpu")
    arrivals, came = arrivals_of(params)
    out = params[2].sum() + params[0].sum()
    assert expected(arrivals, out) == b"\1\0\1"
    assert sorted(came) == [0, 2]
    for handle in arrivals.handles:
        handle.remove()
    params[1].sum().backward()
    assert sorted(came) == [0, 2]


def test_autograd_grad_is_foretold_to_reach_none() -> None:
    params = params_on("cpu", "cpu")
    arrivals, came = arrivals_of(params)
    out = params[0].sum()
    assert expected(arrivals, out, run=lambda: torch.autograd.grad(out, params[0])) == b"\0\0"
    assert came == []


@pytest.mark.parametrize(
    ("delayed", "counted_on"), [((), b"\1\0\1\1"), ((0,), b"\0\0\1\1"), ((1, 2, 3), b"\1\0\0\0")], ids=str
)
def test_delayed_parameters_are_not_waited_for(delayed: tuple[int, ...], counted_on: bytes) -> None:
    params = params_on(*["cpu"] * 4)
    arrivals, _ = arrivals_of(params, delayed)
    arrival = expected(arrivals, params[0].sum() + params[2].sum() + params[3].sum())
    assert arrival == b"\1\0\1\1"
    assert arrivals.counted_on(arrival) == counted_on


def double(param: torch.Tensor) -> None:
    param.grad.mul_(2)


def test_a_gradient_that_later_hooks_change_is_final_at_the_end_only() -> None:
    params = params_on("cpu", "cpu", "cpu")
    params[0].register_post_accumulate_grad_hook(double)  # before ours
    arrivals, _ = arrivals_of(params)
    later = params[1].register_post_accumulate_grad_hook(double)
    total = lambda: sum(p.sum() for p in params)  # noqa: E731
    assert expected(arrivals, total()) == b"\1\0\1"
    later.remove()
    assert expected(arrivals, total()) == b"\1\1\1"


def test_several_devices_wait_for_the_end() -> None:
    arrivals, _ = arrivals_of(params_on("cpu", "meta"))
    assert arrivals.counted_on(b"\1\1") is None
    arrivals, _ = arrivals_of(params_on("meta", "meta"))
    assert arrivals.counted_on(b"\1\1") == b"\1\1"


def test_lowered_parameters_have_nodes_of_their_own() -> None:
    (param,) = params_on("cpu")
    arrivals, _ = arrivals_of([param], lowered=True)
    param.data = param.data.bfloat16()
    out = (param * 2).sum()
    assert expected(arrivals, out) == b"\1"
    assert expected(arrivals, (param * 2).sum(), forwards=2) is None


def test_where_the_engine_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autograd, "_will_execute", None)
    params = params_on("cpu", "cpu")
    arrivals, came = arrivals_of(params, delayed=(0,))
    arrival = expected(arrivals, params[0].sum())
    assert arrival is None
    assert arrivals.counted_on(arrival) is None
    assert came == [0]
