"""The check that replicas are still equal."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import MLP, ConvNet, Mixed
from torch import nn

from unified_ddp.errors import MisuseError, ReplicaMismatchError
from unified_ddp.torch import DistributedDataParallel
from unified_ddp.torch.module import replicas
from unified_ddp.torch.module.replicas import check_replicas, fingerprint
from unified_ddp.torch.reduction.transport import ProcessGroupTransport

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_fingerprint_sees_every_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_CHUNK", 5)
    bits = torch.randint(0, 2, (8 * torch.empty((), dtype=dtype).element_size() * 3,), dtype=torch.uint8)
    if dtype is torch.bool:
        bits = torch.tensor([1, 0, 0, 0, 0, 0, 0, 0] * 3, dtype=torch.uint8)

    def tensor(b: torch.Tensor) -> torch.Tensor:
        packed = (b.view(-1, 8) * (2 ** torch.arange(8, dtype=torch.uint8))).sum(1, dtype=torch.uint8)
        return packed.view(dtype)

    flips = range(0, len(bits), 8) if dtype is torch.bool else range(len(bits))
    found = {fingerprint(tensor(bits)).item()}
    for i in flips:
        other = bits.clone()
        other[i] ^= 1
        found.add(fingerprint(tensor(other)).item())
    assert len(found) == 1 + len(flips)


def test_a_fingerprint_follows_bits_and_order() -> None:
    a = torch.tensor([1.0, float("nan"), 0.0, 2.0])
    assert fingerprint(a) == fingerprint(a.clone())
    assert fingerprint(a) != fingerprint(a.flip(0))
    assert fingerprint(torch.tensor([0.0])) != fingerprint(torch.tensor([-0.0]))
    image = torch.randn(2, 3, 4, 4)
    assert fingerprint(image) == fingerprint(image.to(memory_format=torch.channels_last))
    assert fingerprint(torch.empty(0)).item() == 0
    scalar = torch.tensor(3.0)
    assert fingerprint(scalar) == fingerprint(scalar.view(1))
    assert fingerprint(torch.eye(3).to_sparse()) == fingerprint(torch.eye(3))


def mismatch(ddp: DistributedDataParallel, **options: Any) -> str:
    with pytest.raises(ReplicaMismatchError) as caught:
        ddp.check_replicas(**options)
    return str(caught.value)


def case_by_hand(rank: int, world_size: int) -> list[str]:
    messages = []
    ddp = DistributedDataParallel(Mixed())
    with torch.no_grad():
        ddp.module.d.fill_(float("nan"))
    ddp.check_replicas()
    name = "b.weight"
    with torch.no_grad():
        if rank == 1:  # one bit of one float64
            ddp.module.get_parameter(name).view(torch.int64)[2, 3] ^= 1
        ddp.module.c[0] += 1e-3 * (rank == 2)
    messages.append(mismatch(ddp))
    conv = DistributedDataParallel(ConvNet())
    conv.module.bn.running_var[2] += float(rank == 0)
    conv.check_replicas()
    messages.append(mismatch(conv, buffers=True))
    with conv.join(), pytest.raises(MisuseError, match=r"check_replicas\(\) cannot be called inside `join`"):
        conv.check_replicas()
    return messages


def test_every_rank_names_the_first_difference(world: Callable[[int], Any]) -> None:
    results = world(3).run(case_by_hand)
    assert results[0] == results[1] == results[2]
    parameters, buffers = results[0]
    assert "parameter 'c' differs" in parameters
    assert "on ranks 0, 1" in parameters
    assert "on rank 2" in parameters
    assert "2 of 7 parameters differ" in parameters
    assert "buffer 'bn.running_var' differs" in buffers
    assert "on rank 0" in buffers
    assert "on ranks 1, 2" in buffers


def case_every(rank: int, world_size: int, every: int) -> tuple[int, bool]:
    """Rank 1's optimizer has another learning rate: found before the next step that checks."""
    ddp = DistributedDataParallel(MLP(), check_replicas_every=every)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1 + 0.01 * rank)
    for step in range(1, 10):
        try:
            with ddp.no_sync():
                ddp(torch.randn(5, 8)).sum().backward()
            if step % 2:
                ddp(torch.randn(5, 8)).sum().backward()
            else:
                ddp.sync_gradients()
        except ReplicaMismatchError as error:
            return step, "'layers.0.weight'" in str(error)
        optimizer.step()
    raise AssertionError("not found")


@pytest.mark.parametrize("every", [1, 3])
def test_every_n_steps(world: Callable[[int], Any], every: int) -> None:
    assert world(2).run(case_every, every=every) == [(max(2, every), True)] * 2


def case_healthy(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(MLP(), check_replicas_every=1)
    optimizer = torch.optim.Adam(ddp.parameters())
    ignored = nn.Module()
    ignored.a, ignored.b = nn.Linear(2, 2), nn.Linear(2, 2)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignored, ["b.weight", "b.bias"])
    DistributedDataParallel(ignored).check_replicas()
    for _ in range(3):
        ddp(torch.randn(5, 8)).sum().backward()
        optimizer.step()
    with ddp.join():  # ranks without inputs do not step: no check
        for _ in range(2 + rank):
            ddp(torch.randn(5, 8)).sum().backward()
            optimizer.step()
    ddp(torch.randn(5, 8)).sum().backward()
    dist.barrier()


def test_equal_replicas_pass(world: Callable[[int], Any]) -> None:
    world(2).run(case_healthy)


def case_other_numbers(rank: int, world_size: int) -> str:
    transport = ProcessGroupTransport(dist.group.WORLD, torch.device("cpu"))
    check_replicas(transport, {})
    check_replicas(transport, {"a": torch.ones(3), "b": torch.ones(())})
    with pytest.raises(ReplicaMismatchError) as caught:
        check_replicas(transport, {str(i): torch.ones(3) for i in range(1 + rank)}, "buffer")
    return str(caught.value)


def test_other_numbers_of_tensors(world: Callable[[int], Any]) -> None:
    for message in world(2).run(case_other_numbers):
        assert "there are 1 buffers on rank 0, 2 buffers on rank 1. Change modules alike on all ranks" in message
