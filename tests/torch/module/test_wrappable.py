"""Tensors that cannot be synchronised are named at construction, with what to do."""

import datetime
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

from unified_ddp.torch import DistributedDataParallel
from unified_ddp.torch.module.wrappable import check_wrappable


class Model(nn.Module):
    def __init__(self, parameter: torch.Tensor | None = None, buffer: torch.Tensor | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        if parameter is not None:
            self.odd = nn.Parameter(parameter, requires_grad=parameter.is_floating_point())
        self.register_buffer("odd_buffer", buffer)


META = torch.ones(3, device="meta")
KINDS: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "meta parameter": (lambda: nn.Linear(3, 3, device="meta"), "weight, bias", "to_empty"),
    "meta buffer": (lambda: Model(buffer=META), "odd_buffer", "to_empty"),
    "quantized buffer": (
        lambda: Model(buffer=torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)),
        "odd_buffer",
        "dequantize",
    ),
    "sparse buffer": (lambda: Model(buffer=torch.eye(3).to_sparse()), "odd_buffer", "to_dense"),
    "float8 parameter": (lambda: Model(torch.ones(4).to(torch.float8_e4m3fn)), "odd", "wider dtype"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_synchronised(kind: str) -> None:
    make, name, remedy = KINDS[kind]
    model = make()
    with pytest.raises(ValueError, match=rf"parameters or buffers are .*: {name}\. .*{remedy}.*ignore list"):
        check_wrappable(model.state_dict(keep_vars=True))


def case_named(rank: int, world_size: int, init_sync: bool) -> None:
    for make, name, _ in KINDS.values():
        with pytest.raises(ValueError, match=f": {name}\\."):
            DistributedDataParallel(make(), init_sync=init_sync)
    replicated = distribute_tensor(torch.ones(3), init_device_mesh("cpu", (world_size,)), [Replicate()])
    with pytest.raises(ValueError, match=r"DTensors.*: odd\. .*device_mesh="):
        DistributedDataParallel(Model(replicated), init_sync=init_sync)
    ignoring = Model(META)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignoring, ["odd"])
    DistributedDataParallel(ignoring, init_sync=init_sync)


@pytest.mark.parametrize("init_sync", [True, False])
def test_they_are_named_on_all_ranks(world: Callable[[int], Any], init_sync: bool) -> None:
    world(2).run(case_named, init_sync=init_sync)


def case_on_one(rank: int, world_size: int) -> str:
    group = dist.new_group(timeout=datetime.timedelta(seconds=4))
    with pytest.raises((ValueError, RuntimeError)) as caught:
        DistributedDataParallel(nn.Linear(3, 3, device="meta" if rank else "cpu"), process_group=group)
    return str(caught.value)


def test_the_others_learn_what_one_rank_met(world: Callable[[int], Any]) -> None:
    waited, raised = world(2).run(case_on_one)
    assert "on the meta device" in raised
    assert "rank 1" in waited
    assert "on the meta device" in waited
