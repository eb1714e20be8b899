"""Options and members with few lines each: meshes, buffer hooks, checkpoints, mixed precision's copies."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import MLP, ConvNet
from support.oracle import assert_equals_oracle, oracle
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel.distributed import _BufferCommHookLocation, _MixedPrecision

from unified_ddp.torch import DistributedDataParallel


def backward(module: nn.Module, x: torch.Tensor) -> None:
    module(x).pow(2).mean().backward()


def check(ddp: DistributedDataParallel, x: torch.Tensor) -> None:
    ddp.zero_grad()
    expected = oracle(ddp.module, lambda m: backward(m, x))
    backward(ddp, x)
    assert_equals_oracle(ddp.module, expected)


def case_mesh(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    ddp = DistributedDataParallel(MLP(), device_mesh=mesh)
    assert ddp.process_group is mesh.get_group()
    assert ddp.device_mesh is mesh
    for _ in range(3):
        check(ddp, torch.randn(5, 8))
    with pytest.raises(RuntimeError, match="both process_group and device_mesh"):
        DistributedDataParallel(MLP(), device_mesh=mesh, process_group=dist.group.WORLD)
    with pytest.raises(RuntimeError, match="1D"):
        DistributedDataParallel(MLP(), device_mesh=init_device_mesh("cpu", (world_size, 1)))


def test_device_mesh(world: Callable[[int], Any]) -> None:
    world(2).run(case_mesh)


def case_mesh_slice(rank: int, world_size: int) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(2)
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    plain = copy.deepcopy(module)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    ddp = DistributedDataParallel(parallelize_module(module, mesh["tensor"], plan), device_mesh=mesh["data"])
    local = dict(ddp.module.named_parameters())  # torch shows the sharded tensors in their place from the forward on
    assert not any(isinstance(p, DTensor) for p in local.values())
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    backward(ddp, x)
    backward(plain, x)
    for name, dim in (("0.weight", 0), ("2.weight", 1)):
        whole = plain.get_parameter(name).grad
        assert whole is not None
        torch.testing.assert_close(local[name].grad, whole.chunk(world_size, dim=dim)[rank])


def test_tensor_parallel_module_on_a_slice_of_a_mesh(world: Callable[[int], Any]) -> None:
    world(2).run(case_mesh_slice)


def case_buffer_hook(rank: int, world_size: int, after: bool, future: bool) -> None:
    ddp = DistributedDataParallel(ConvNet())
    called: list[int] = []

    def average(state: Any, buffers: dict[str, torch.Tensor]) -> Any:
        assert state == "state"
        called.append(len(buffers))
        works = [dist.all_reduce(b, async_op=True) for b in buffers.values() if b.is_floating_point()]
        if future:
            return [w.get_future() for w in works]
        for work in works:
            work.wait()
        return None

    where = _BufferCommHookLocation.POST_FORWARD if after else _BufferCommHookLocation.PRE_FORWARD
    ddp._register_buffer_comm_hook("state", average, where)
    for _ in range(2):
        ddp.module.bn.running_mean.fill_(float(rank + 1))
        x = torch.randn(5, 64)
        ddp.zero_grad()
        expected = oracle(ddp.module, lambda m, x=x: backward(m, x))
        backward(ddp, x)
        assert_equals_oracle(ddp.module, expected)
        everybodys = [torch.empty(6) for _ in range(world_size)]
        dist.all_gather(everybodys, ddp.module.bn.running_mean)
        # averaged after the batch's own update: equal; before it: different; futures are waited for after the backward
        if after or not future:
            assert torch.equal(everybodys[0], everybodys[1]) == after
    assert called == [3, 3]


@pytest.mark.parametrize("future", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_buffer_hooks(world: Callable[[int], Any], after: bool, future: bool) -> None:
    world(2).run(case_buffer_hook, after=after, future=future)


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
        nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")
        other.load_state_dict(state)
        other_ddp = DistributedDataParallel(other)
    else:
        other_ddp = DistributedDataParallel(other)
        other_ddp.load_state_dict(state)
    for mine, theirs in zip(ddp.parameters(), other_ddp.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    for _ in range(2):
        check(other_ddp, torch.randn(5, 64))


@pytest.mark.parametrize("plain", [False, True])
def test_save_and_load(world: Callable[[int], Any], plain: bool) -> None:
    world(2).run(case_checkpoint, plain=plain)


def case_mixed(rank: int, world_size: int) -> None:
    config = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ddp = DistributedDataParallel(MLP(), mixed_precision=config)
    x = torch.randn(5, 8)
    backward(ddp, x)
    other = copy.deepcopy(ddp)
    ddp.eval()
    with torch.no_grad():
        assert ddp(x).dtype == torch.bfloat16
    ddp.train()
    for module in (ddp, other):
        assert all(p.dtype == torch.float32 for p in module.parameters())
        module.zero_grad()
        with module.no_sync():
            backward(module, x)
        backward(module, x)
        assert all(p.dtype == torch.float32 and p.grad.dtype == torch.float32 for p in module.parameters())
    for mine, theirs in zip(ddp.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
        everybodys = [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_gather(everybodys, mine.grad)
        assert torch.equal(everybodys[0], everybodys[1])


def test_mixed_precision_evaluates_accumulates_and_copies(world: Callable[[int], Any]) -> None:
    world(2).run(case_mixed)


def case_scatter_gather(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(MLP())
    inputs, kwargs = ddp.to_kwargs((torch.ones(2), "text"), {"a": [torch.zeros(1)]}, 0)
    assert torch.equal(inputs[0][0], torch.ones(2))
    assert inputs[0][1] == "text"
    assert torch.equal(kwargs[0]["a"][0], torch.zeros(1))
    assert ddp.train(False) is ddp
    assert not ddp.module.training
    assert ddp.join_device == torch.device("cpu")
    assert ddp.join_process_group is ddp.process_group
    ddp._set_sparse_metadata({"a": torch.zeros(1)})
    ddp._set_ddp_sink_clone(False)
    ddp._register_accum_grad_hook()
    check(ddp.train(), torch.randn(5, 8))


def test_small_members(world: Callable[[int], Any]) -> None:
    world(2).run(case_scatter_gather)
