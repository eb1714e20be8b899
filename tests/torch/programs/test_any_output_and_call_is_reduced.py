"""Programs around the wrapper, against the oracle: kinds of outputs, several wrappers, functional calls, compile."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import MLP, ConvNet
from support.oracle import assert_equals_oracle, oracle
from support.outputs import OUTPUTS
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from unified_ddp.torch import DistributedDataParallel

OPTIONS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"static_graph": True},
]


def check(ddp: nn.Module, module: nn.Module, run: Callable[[nn.Module], Any]) -> None:
    module.zero_grad()
    expected = oracle(module, run)
    run(ddp)
    assert_equals_oracle(module, expected)


class Returning(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body, self.kind = MLP(), kind

    def forward(self, x: torch.Tensor) -> Any:
        return OUTPUTS[self.kind][0](self.body(x))


def case_outputs(rank: int, world_size: int, options: dict[str, Any]) -> None:
    for kind, (make, value) in OUTPUTS.items():
        ddp = DistributedDataParallel(Returning(kind), **options)
        for _ in range(3):
            x = torch.randn(5, 8)
            check(ddp, ddp.module, lambda m, x=x, value=value: value(m(x)).pow(2).mean().backward())
        if kind != "generator":
            assert type(ddp(x)) is type(make(x))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_outputs(world: Callable[[int], Any], options: dict[str, Any]) -> None:
    world(2).run(case_outputs, options=options)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 2)

    def forward(self, packed: Any) -> Any:
        out, _ = self.lstm(packed)
        padded, _ = pad_packed_sequence(out, batch_first=True)
        return self.head(padded), out


def case_packed(rank: int, world_size: int, options: dict[str, Any]) -> None:
    ddp = DistributedDataParallel(Packed(), **options)
    for _ in range(3):
        packed = pack_padded_sequence(torch.randn(3, 5, 8), [5, 3, 2 - rank], batch_first=True)

        def run(m: nn.Module, packed: Any = packed) -> None:
            out, again = m(packed)
            (out.pow(2).mean() + again.data.sum()).backward()

        check(ddp, ddp.module, run)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_packed_sequences(world: Callable[[int], Any], options: dict[str, Any]) -> None:
    world(2).run(case_packed, options=options)


def case_functional_call(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(MLP())
    names = dict(ddp.named_parameters())
    for _ in range(3):
        x = torch.randn(5, 8)

        def run(m: nn.Module, x: torch.Tensor = x) -> None:
            held = dict(m.named_parameters())
            torch.func.functional_call(m, held, (x,)).pow(2).mean().backward()

        check(ddp, ddp.module, run)
    # other tensors than the module's get their own gradients, and the module's none
    ddp.zero_grad()
    others = {n: p.detach().clone().requires_grad_() for n, p in names.items()}
    torch.func.functional_call(ddp, others, (x,)).sum().backward()
    assert all(p.grad is None for p in ddp.parameters())
    assert all(p.grad is not None for p in others.values())


def test_functional_call(world: Callable[[int], Any]) -> None:
    world(2).run(case_functional_call)


class Nest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.inner = DistributedDataParallel(MLP())
        self.after = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.inner(self.before(x)))


def case_nested(rank: int, world_size: int) -> None:
    module = Nest()
    inside = {f"inner.{n}" for n, _ in module.inner.named_parameters()}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, inside)
    ddp = DistributedDataParallel(module)
    plain = nn.Sequential(module.before, module.inner.module, module.after)
    for _ in range(3):
        x = torch.randn(5, 8)
        plain.zero_grad()
        expected = oracle(plain, lambda m, x=x: m(x).pow(2).mean().backward())
        ddp(x).pow(2).mean().backward()
        assert_equals_oracle(plain, expected)


def test_nested(world: Callable[[int], Any]) -> None:
    world(2).run(case_nested)


def case_gan(rank: int, world_size: int, options: dict[str, Any]) -> None:
    generator = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8)), **options)
    critic = DistributedDataParallel(MLP(), **options)
    pair = nn.ModuleList([generator.module, critic.module])
    both = nn.ModuleList([generator, critic])
    steps = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (generator, critic)]
    for _ in range(3):
        noise, real = torch.randn(5, 4), torch.randn(5, 8)

        def criticise(m: Any, noise: torch.Tensor = noise, real: torch.Tensor = real) -> None:
            (m[1](m[0](noise).detach()).mean() - m[1](real).mean()).backward()

        def generate(m: Any, noise: torch.Tensor = noise) -> None:
            m[1].requires_grad_(False)
            (-m[1](m[0](noise)).mean()).backward()
            m[1].requires_grad_(True)

        for run, step in ((criticise, steps[1]), (generate, steps[0])):
            pair.zero_grad()
            expected = oracle(pair, run)
            run(both)
            assert_equals_oracle(pair, expected)
            step.step()


@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_gan_alternation(world: Callable[[int], Any], options: dict[str, Any]) -> None:
    world(2).run(case_gan, options=options)


def case_interleaved(rank: int, world_size: int) -> None:
    many = [DistributedDataParallel(MLP(16 + 4 * i), gradient_as_bucket_view=bool(i % 2)) for i in range(4)]
    plain, wrapped = nn.ModuleList([m.module for m in many]), nn.ModuleList(many)
    for _ in range(3):
        x = torch.randn(5, 8)

        def run(ms: Any, x: torch.Tensor = x) -> None:
            torch.stack([m(x).pow(2).mean() for m in ms]).sum().backward()

        plain.zero_grad()
        expected = oracle(plain, run)
        run(wrapped)
        assert_equals_oracle(plain, expected)


def test_several_wrappers_in_one_backward(world: Callable[[int], Any]) -> None:
    world(2).run(case_interleaved)


def case_compiled(rank: int, world_size: int, options: dict[str, Any], outside: bool) -> int:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph)
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    for make, shape in ((MLP, (5, 8)), (ConvNet, (5, 64))):
        ddp = DistributedDataParallel(make(), **options)
        called = torch.compile(ddp, backend=backend) if outside else ddp
        if not outside:
            ddp.module.compile(backend=backend)
        plain = ddp.module
        for _ in range(3):
            x = torch.randn(*shape)
            plain.zero_grad()
            expected = oracle(plain, lambda m, x=x: m(x).pow(2).mean().backward()) if outside else None
            if expected is None:
                copied = make()
                copied.load_state_dict(plain.state_dict())
                expected = oracle(copied, lambda m, x=x: m(x).pow(2).mean().backward())
            called(x).pow(2).mean().backward()
            assert_equals_oracle(plain, expected)
    return len(graphs)


@pytest.mark.parametrize("outside", [True, False], ids=["the wrapper", "the module"])
@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=str)
def test_compiled(world: Callable[[int], Any], options: dict[str, Any], outside: bool) -> None:
    counts = world(2).run(case_compiled, options=options, outside=outside, timeout=150)
    assert min(counts) >= 2
