"""What the class is to others: a subclass of torch's that never uses its constructor or reducer; pickles and copies."""

import copy
import gc
import io
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import MLP, ConvNet
from support.oracle import assert_equals_oracle, check_step, oracle
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from unified_ddp.torch import DistributedDataParallel


def backward(module: torch.nn.Module, x: torch.Tensor) -> None:
    module(x).pow(2).mean().backward()


def step_and_check(ddp: DistributedDataParallel) -> None:
    x = torch.randn(5, 8)
    check_step(ddp, lambda m: backward(m, x))


def case_never_torchs(rank: int, world_size: int) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("torch's own reducer or constructor was reached")

    before = TorchDDP.__init__, dist.Reducer
    TorchDDP.__init__, dist.Reducer = refuse, refuse
    try:
        for options in (
            {},
            {"gradient_as_bucket_view": True},
            {"find_unused_parameters": True},
            {"static_graph": True},
        ):
            ddp = DistributedDataParallel(MLP(), **options)
            for _ in range(3):
                step_and_check(ddp)
            step_and_check(copy.deepcopy(ddp))
    finally:
        TorchDDP.__init__, dist.Reducer = before


def test_torchs_reducer_and_constructor_are_never_reached(world: Callable[[int], Any]) -> None:
    assert issubclass(DistributedDataParallel, TorchDDP)
    world(2).run(case_never_torchs)


def case_copies(rank: int, world_size: int, how: str, options: dict[str, Any]) -> None:
    ddp = DistributedDataParallel(MLP(), **options)
    step_and_check(ddp)
    if how == "deepcopy":
        other = copy.deepcopy(ddp)
    else:
        memory = io.BytesIO()
        torch.save(ddp, memory)
        memory.seek(0)
        other = torch.load(memory, weights_only=False)
    for mine, theirs in zip(ddp.parameters(), other.parameters(), strict=True):
        assert mine is not theirs
        assert torch.equal(mine, theirs)
    for _ in range(3):
        step_and_check(other)
        step_and_check(ddp)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}], ids=str)
def test_copies_reduce(world: Callable[[int], Any], how: str, options: dict[str, Any]) -> None:
    world(2).run(case_copies, how=how, options=options)


def case_hook_survives(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(MLP())
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    other = copy.deepcopy(ddp)
    assert other.reducer.comm_hook.hook is default_hooks.allreduce_hook
    step_and_check(other)


def test_comm_hooks_survive_a_deepcopy(world: Callable[[int], Any]) -> None:
    world(2).run(case_hook_survives)


def case_other_group(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(MLP(), process_group=dist.new_group())
    with pytest.raises(RuntimeError, match="default process group"):
        copy.deepcopy(ddp)


def test_pickling_needs_the_default_group(world: Callable[[int], Any]) -> None:
    world(2).run(case_other_group)


def case_freed(rank: int, world_size: int) -> None:
    model = MLP()
    ddp = DistributedDataParallel(model)
    out = ddp(torch.randn(5, 8))
    reference = weakref.ref(ddp)
    reducer = weakref.ref(ddp.reducer)
    gc.disable()  # nothing may be left to the garbage collector, which comes at another time on each rank
    del ddp
    gc.enable()
    assert reference() is None
    assert reducer() is None
    out.sum().backward()  # plain autograd again: the hooks are gone
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
    step_and_check(DistributedDataParallel(model))


def test_a_dropped_wrapper_leaves_the_module_plain(world: Callable[[int], Any]) -> None:
    world(2).run(case_freed)


def case_state_dict(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(ConvNet())
    state = ddp.state_dict()
    assert all(k.startswith("module.") for k in state)
    torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")
    ConvNet().load_state_dict(state)
    other = ConvNet()
    ddp.module.load_state_dict(other.state_dict())
    dist.broadcast(ddp.module.head.weight.data, 0)


def test_state_dicts(world: Callable[[int], Any]) -> None:
    world(2).run(case_state_dict)


def case_checkpoint(rank: int, world_size: int, plain: bool) -> None:
    ddp = DistributedDataParallel(ConvNet())
    backward(ddp, torch.randn(5, 64))
    memory = io.BytesIO()
    torch.save(ddp.state_dict(), memory)
    kept = [memory.getvalue()]
    dist.broadcast_object_list(kept, 0)
    state = torch.load(io.BytesIO(kept[0]), map_location="cpu", weights_only=True)
    other = ConvNet()
    if plain:
        torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")
        other.load_state_dict(state)
        other_ddp = DistributedDataParallel(other)
    else:
        other_ddp = DistributedDataParallel(other)
        other_ddp.load_state_dict(state)
    for mine, theirs in zip(ddp.parameters(), other_ddp.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    for _ in range(2):
        x = torch.randn(5, 64)
        check_step(other_ddp, lambda m, x=x: backward(m, x))


@pytest.mark.parametrize("plain", [False, True])
def test_save_and_load(world: Callable[[int], Any], plain: bool) -> None:
    world(2).run(case_checkpoint, plain=plain)


def case_no_sync_disabled(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=0.0005)
    for _ in range(2):
        batches = [torch.randn(5, 8) for _ in range(3)]
        ddp.zero_grad()
        expected = oracle(ddp.module, lambda m, b=batches: [m(x).pow(2).sum().backward() for x in b])
        for i, x in enumerate(batches):
            with ddp.no_sync(enabled=i < len(batches) - 1):
                ddp(x).pow(2).sum().backward()
        assert ddp.require_backward_grad_sync
        assert_equals_oracle(ddp.module, expected)
        with ddp.no_sync(), ddp.no_sync(enabled=False):  # the outer one holds
            assert not ddp.require_backward_grad_sync


def test_no_sync_can_be_switched_off(world: Callable[[int], Any]) -> None:
    world(2).run(case_no_sync_disabled)


def case_unreduced(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(MLP())
    x = torch.randn(5, 8)
    with pytest.warns(UserWarning, match=r"without passing an output of it.* Call the wrapper, not wrapper\.module"):
        backward(ddp.module, x)
    with warnings.catch_warnings(action="error"):
        backward(ddp.module, x)  # told once
    with ddp.no_sync(), warnings.catch_warnings(action="error"):
        backward(DistributedDataParallel(MLP()), x)
        backward(ddp, x)
    check_step(ddp, lambda m: backward(m, x))


def test_gradients_that_pass_no_output_are_told(world: Callable[[int], Any]) -> None:
    world(2).run(case_unreduced)
