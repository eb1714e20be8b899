"""Construction: ranks that differ, arguments that cannot be right, and what is synchronised."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import MLP, ConvNet
from support.oracle import check_step
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

from unified_ddp.torch import DistributedDataParallel


class Named(nn.Module):
    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x)
        return x


class Table(nn.Module):
    def __init__(self, size: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.register_buffer("values", torch.zeros(size, dtype=dtype))


def tied(module: nn.Module, really: bool) -> nn.Module:
    if really:
        module.b.weight = module.a.weight
    return module


def ignoring(module: nn.Module, names: list[str]) -> nn.Module:
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
    return module


def delaying(module: nn.Module, names: list[str]) -> dict[str, Any]:
    named = [(n, module.get_parameter(n)) for n in names]
    trigger = module.head.weight if named else None
    return {"module": module, "delay_all_reduce_named_params": named or None, "param_to_hook_all_reduce": trigger}


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


MISMATCHES: dict[str, tuple[Callable[[int], dict[str, Any]], list[str]]] = {
    "shape": (
        lambda rank: {"module": Named(a=nn.Linear(4, 4), b=nn.Linear(4, 4 + (rank == 1)))},
        ["shape of parameter 'b.weight'", "[4, 4] on ranks 0, 2", "[5, 4] on rank 1"],
    ),
    "same sizes, other shapes": (
        lambda rank: {"module": Named(a=nn.Linear(2, 8, bias=False) if rank else nn.Linear(8, 2, bias=False))},
        ["shape of parameter 'a.weight'", "[2, 8] on rank 0", "[8, 2] on ranks 1, 2"],
    ),
    "dtype": (
        lambda rank: {"module": Named(a=nn.Linear(4, 4, dtype=torch.float64 if rank == 2 else None))},
        ["dtype of parameter 'a.weight'", "float32 on ranks 0, 1", "float64 on rank 2"],
    ),
    "order": (
        lambda rank: {
            "module": Named(a=nn.Linear(4, 4), b=nn.Linear(4, 4))
            if rank
            else Named(b=nn.Linear(4, 4), a=nn.Linear(4, 4))
        },
        ["parameter number 0", "'b.weight' on rank 0", "'a.weight' on ranks 1, 2"],
    ),
    "count": (
        lambda rank: {"module": Named(a=nn.Linear(4, 4), **({"b": nn.Linear(4, 4)} if rank == 0 else {}))},
        ["parameter number 2", "'b.weight' on rank 0", "absent on ranks 1, 2", "4 parameters on rank 0"],
    ),
    "frozen": (
        lambda rank: {"module": Named(a=nn.Linear(4, 4), b=frozen(nn.Linear(4, 4)) if rank else nn.Linear(4, 4))},
        ["trainable of parameter 'b.weight'", "True on rank 0", "False on ranks 1, 2"],
    ),
    "strides": (
        lambda rank: {"module": ConvNet(channels_last=rank == 1)},
        ["strides of parameter 'conv2.weight'"],
    ),
    "buffers": (
        lambda rank: {"module": Named(a=nn.Linear(4, 4), b=nn.BatchNorm1d(4, track_running_stats=rank != 1))},
        ["buffer number 0", "'b.running_mean' on ranks 0, 2", "absent on rank 1"],
    ),
    "options": (
        lambda rank: {"module": MLP(), "find_unused_parameters": rank == 1},
        ["find_unused_parameters", "False on ranks 0, 2", "True on rank 1"],
    ),
    "bucket caps": (
        lambda rank: {"module": MLP(), "bucket_cap_mb": 1 + rank},
        ["bucket caps", "1048576"],
    ),
    "names": (
        lambda rank: {"module": Named(**{"b" if rank == 2 else "a": nn.Linear(4, 4)})},
        ["parameter number 0", "'a.weight' on ranks 0, 1", "'b.weight' on rank 2"],
    ),
    "tied": (
        lambda rank: {"module": tied(Named(a=nn.Linear(4, 4), b=nn.Linear(4, 4)), rank == 1)},
        ["parameter number 2", "'b.weight' on ranks 0, 2", "'b.bias' on rank 1", "3 parameters on rank 1"],
    ),
    "buffer shape": (
        lambda rank: {"module": Named(a=nn.Linear(4, 4), b=Table(3 + (rank == 0)))},
        ["shape of buffer 'b.values'", "[4] on rank 0", "[3] on ranks 1, 2"],
    ),
    "buffer dtype": (
        lambda rank: {"module": Named(a=nn.Linear(4, 4), b=Table(3, torch.float64 if rank else torch.int64))},
        ["dtype of buffer 'b.values'", "int64 on rank 0", "float64 on ranks 1, 2"],
    ),
    "sparse gradients": (
        lambda rank: {"module": Named(a=nn.Embedding(4, 4, sparse=rank == 2))},
        ["parameters with sparse gradients is [] on ranks 0, 1, ['a.weight'] on rank 2"],
    ),
    "ignored": (
        lambda rank: {"module": ignoring(Named(a=nn.Linear(4, 4), b=nn.Linear(4, 4)), ["b.weight"] * (rank == 0))},
        ["parameter number 2", "'b.bias' on rank 0", "'b.weight' on ranks 1, 2"],
    ),
    "delayed": (
        lambda rank: delaying(MLP(), ["head.bias"] * (rank == 1)),
        ["delay_all_reduce_named_params is [] on ranks 0, 2, ['head.bias'] on rank 1"],
    ),
    "mixed precision": (
        lambda rank: {"module": MLP(), "mixed_precision": _MixedPrecision(torch.bfloat16) if rank == 0 else None},
        ["mixed_precision is", "torch.bfloat16", "on rank 0", "None on ranks 1, 2"],
    ),
}

OPTIONS: dict[str, tuple[Any, Any]] = {
    "static_graph": (False, True),
    "forward_sync_buffers": (True, False),
    "skip_all_reduce_unused_params": (False, True),
    "reduction": ("mean", "sum"),
    "check_replicas_every": (None, 5),
}
for option, (usual, other) in OPTIONS.items():
    MISMATCHES[option] = (
        lambda rank, option=option, usual=usual, other=other: {
            "module": MLP(),
            option: other if rank == 1 else usual,
        },
        [f"{option} is {usual!r} on ranks 0, 2, {other!r} on rank 1"],
    )


def case_mismatch(rank: int, world_size: int, kind: str) -> tuple[str, bool]:
    arguments = MISMATCHES[kind][0](rank)
    before = {k: v.clone() for k, v in arguments["module"].state_dict().items()}
    with pytest.raises(RuntimeError) as caught:
        DistributedDataParallel(**arguments)
    untouched = all(torch.equal(v, before[k]) for k, v in arguments["module"].state_dict().items())
    dist.barrier()
    return f"{type(caught.value).__name__}: {caught.value}", untouched


@pytest.mark.parametrize("kind", MISMATCHES)
def test_all_ranks_name_the_first_difference(world: Callable[[int], Any], kind: str) -> None:
    results = world(3).run(case_mismatch, kind=kind)
    assert len({message for message, _ in results}) == 1
    message, untouched = results[0]
    assert message.startswith("ConstructionMismatchError")
    for fragment in MISMATCHES[kind][1]:
        assert fragment in message
    assert untouched


def case_may_differ(rank: int, world_size: int) -> None:
    """How a rank holds its gradients is its own business."""
    ddp = DistributedDataParallel(MLP(), gradient_as_bucket_view=rank == 1)
    for _ in range(3):
        x = torch.randn(5, 8)
        check_step(ddp, lambda m, x=x: m(x).pow(2).sum().backward())


def test_options_that_may_differ(world: Callable[[int], Any]) -> None:
    world(3).run(case_may_differ)


def case_sync(rank: int, world_size: int, options: dict[str, Any]) -> dict[str, bool]:
    model = ConvNet()
    model.bn.running_mean.fill_(rank)
    ddp = DistributedDataParallel(model, **options)
    equal = {}
    for name, value in ddp.module.state_dict().items():
        every = [torch.empty_like(value) for _ in range(world_size)]
        dist.all_gather(every, value)
        equal[name] = all(torch.equal(every[0], e) for e in every)
    return equal


@pytest.mark.filterwarnings("ignore:.*broadcast_buffers:FutureWarning")
@pytest.mark.parametrize(
    ("options", "params", "buffers"),
    [
        ({}, True, True),
        ({"forward_sync_buffers": False}, True, True),
        ({"broadcast_buffers": False}, True, False),
        ({"init_sync": False}, False, False),
    ],
)
def test_what_construction_synchronises(
    world: Callable[[int], Any], options: dict[str, Any], params: bool, buffers: bool
) -> None:
    for equal in world(2).run(case_sync, options=options):
        assert equal["conv1.weight"] == params
        assert equal["bn.running_mean"] == buffers


def case_buffers(rank: int, world_size: int, sync: bool) -> None:
    ddp = DistributedDataParallel(ConvNet(), forward_sync_buffers=sync)
    ddp(torch.full((4, 64), float(rank)) + torch.randn(4, 64)).sum().backward()
    mean = ddp.module.bn.running_mean.clone()
    every = [torch.empty_like(mean) for _ in range(world_size)]
    dist.all_gather(every, mean)
    assert not torch.equal(every[0], every[1])
    ddp.eval()
    ddp(torch.randn(2, 64))
    assert torch.equal(ddp.module.bn.running_mean, every[0] if sync else mean)


@pytest.mark.parametrize("sync", [True, False])
def test_buffers_follow_rank_0(world: Callable[[int], Any], sync: bool) -> None:
    world(2).run(case_buffers, sync=sync)


def case_ignored(rank: int, world_size: int) -> None:
    model = MLP()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["head.weight"])
    ddp = DistributedDataParallel(model)
    assert "head.weight" not in [p.name for p in ddp.plan.params]
    x = torch.randn(5, 8)
    ddp(x).pow(2).sum().backward()
    every = [torch.empty_like(model.head.weight) for _ in range(world_size)]
    dist.all_gather(every, model.head.weight.grad)
    assert not torch.equal(every[0], every[1])


def test_ignored_parameters_stay_local(world: Callable[[int], Any]) -> None:
    world(2).run(case_ignored)
