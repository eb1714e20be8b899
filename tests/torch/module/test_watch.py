"""What counts as a change of a wrapped module."""

import gc
import weakref
from collections.abc import Callable, Collection

import pytest
import torch
from support.models import MLP, ConvNet
from torch import nn

from unified_ddp.torch.module.watch import ModuleWatch
from unified_ddp.torch.schema import reduced_parameters


def watch(module: nn.Module, ignored: Collection[str] = (), casts: bool = False) -> ModuleWatch:
    return ModuleWatch(module, [p for p, _ in reduced_parameters(module, ignored).values()], ignored, casts)


def half_frozen() -> MLP:
    module = MLP()
    module.layers[0].requires_grad_(False)
    return module


def same_again(m: MLP) -> None:
    m.head.weight = m.head.weight
    m.head = m.head


def calls_functional(m: MLP) -> None:
    others = {n: p.detach().clone().requires_grad_() for n, p in m.named_parameters()}
    torch.func.functional_call(m, others, (torch.ones(2, 8),)).sum().backward()


def loads(m: MLP, assign: bool) -> None:
    m.load_state_dict({n: nn.Parameter(t.clone()) for n, t in m.state_dict().items()}, assign=assign)


CHANGES: dict[str, Callable[[MLP], object]] = {
    "a parameter replaced": lambda m: setattr(m.head, "bias", nn.Parameter(torch.zeros(4))),
    "a parameter added": lambda m: m.register_parameter("scale", nn.Parameter(torch.ones(1))),
    "a submodule added": lambda m: m.add_module("extra", nn.Linear(2, 2)),
    "a submodule replaced": lambda m: setattr(m, "head", nn.Linear(40, 4)),
    "a submodule deep inside": lambda m: m.layers.append(nn.Linear(2, 2)),
    "state assigned": lambda m: loads(m, True),
    "unfrozen": lambda m: m.requires_grad_(True),
    "cast": lambda m: m.double(),
    "a first buffer": lambda m: m.register_buffer("table", torch.zeros(2)),
}
NO_CHANGES: dict[str, Callable[[MLP], object]] = {
    "nothing": lambda m: None,
    "the same again": same_again,
    "functional_call": calls_functional,
    "state copied": lambda m: loads(m, False),
    "frozen": lambda m: m.requires_grad_(False),
    "a submodule without parameters": lambda m: m.add_module("extra", nn.Tanh()),
    "values": lambda m: nn.init.zeros_(m.head.weight),
    "training mode": lambda m: m.eval(),
    "a plain attribute": lambda m: setattr(m, "note", "text"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes(change: str) -> None:
    module = half_frozen()
    watched = watch(module)
    assert not watched.changed()
    CHANGES[change](module)
    assert watched.changed()
    assert watched.changed()  # until another watch is made
    assert not watch(module).changed()


@pytest.mark.parametrize("change", NO_CHANGES)
def test_no_changes(change: str) -> None:
    module = half_frozen()
    watched = watch(module)
    NO_CHANGES[change](module)
    assert not watched.changed()
    assert not watched.differs()


def test_a_change_taken_back() -> None:
    module = half_frozen()
    watched = watch(module)
    before = module.head
    module.head = nn.Linear(40, 4)
    assert watched.changed()
    module.head = before
    assert not watched.changed()


@pytest.mark.parametrize(
    "change", [lambda m: delattr(m, "head"), lambda m: setattr(m.head, "bias", None), lambda m: m.to("meta")]
)
def test_what_torch_does_not_tell_differs_all_the_same(change: Callable[[MLP], object]) -> None:
    module = half_frozen()
    watched = watch(module)
    change(module)
    assert not watched.changed()
    assert watched.differs()


def test_more_buffers_are_no_change() -> None:
    module = ConvNet()
    watched = watch(module)
    module.register_buffer("table", torch.zeros(2))
    module.bn.running_mean = torch.ones(6)
    assert not watched.changed()


def test_ignored_parameters() -> None:
    module = half_frozen()
    watched = watch(module, ["head.bias", "extra.weight", "extra.bias"])
    module.head.bias = nn.Parameter(torch.zeros(4))
    module.extra = nn.Linear(2, 2)
    assert not watched.changed()
    module.head.weight = nn.Parameter(torch.zeros(4, 40))
    assert watched.changed()


def test_casts_of_mixed_precision_tell_nothing() -> None:
    module = half_frozen()
    watched = watch(module, casts=True)
    for p in module.parameters():
        p.data = p.data.bfloat16()
    assert not watched.changed()
    module.layers[0].requires_grad_(True)
    assert watched.changed()


def test_a_part_of_two_modules_tells_both() -> None:
    shared = nn.Linear(2, 2)
    first, second = nn.Sequential(shared), nn.Sequential(nn.Linear(2, 2), shared)
    watches = [watch(first), watch(second)]
    shared.weight = nn.Parameter(torch.zeros(2, 2))
    assert [w.changed() for w in watches] == [True, True]
    second[0] = nn.Linear(2, 2)
    assert not watch(first).changed()


def test_a_watch_keeps_no_module_alive() -> None:
    module = MLP()
    watched = watch(module)
    gone = weakref.ref(watched), weakref.ref(module)
    del watched, module
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
