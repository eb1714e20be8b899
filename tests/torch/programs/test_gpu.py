"""GPUs: NCCL, one rank a GPU, and two gloo ranks that share the first; streams; JAX replicas on the same GPU.

At world size 1 a reduction must leave gradients as plain autograd has them; everything is held against the oracle.
"""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import device_cases as cases
from support import jax_replicas
from support.models import MLP
from support.oracle import assert_equals_oracle, check_step, oracle
from support.world import World
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from unified_ddp.torch import DistributedDataParallel
from unified_ddp.torch.reduction.comm_hook import FutureReduction, WorkReduction
from unified_ddp.torch.reduction.transport import ProcessGroupTransport

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

RUNS: list[tuple[str, dict[str, Any]]] = [
    *(("case_training", {"model": model, "options": options}) for model in cases.MODELS for options in cases.OPTIONS),
    *(("case_no_sync", {"options": options}) for options in cases.OPTIONS),
    *(("case_unused", {"skip": skip}) for skip in (False, True)),
    ("case_mixed_precision", {"dtype": "bfloat16", "model": "mlp"}),
    ("case_mixed_precision", {"dtype": "float16", "model": "mlp"}),
    ("case_mixed_precision", {"dtype": "bfloat16", "model": "convolutions, channels_last"}),
    *(("case_hook", {"hook": hook, "view": view}) for hook in cases.HOOKS for view in (False, True)),
    ("case_quantized", {}),
    *(("case_optimizer_in_backward", {"view": view}) for view in (False, True)),
]


@pytest.fixture(scope="module", params=["nccl", "gloo"])
def ranks(request: pytest.FixtureRequest) -> Iterator[World]:
    """NCCL over all GPUs, be it one, and two gloo ranks on one GPU."""
    size = torch.cuda.device_count() if request.param == "nccl" else 2
    world = World(size, backend=request.param)
    yield world
    world.stop()


@pytest.mark.parametrize(("case", "arguments"), RUNS, ids=lambda value: str(value).replace("case_", ""))
def test_against_the_oracle(ranks: World, case: str, arguments: dict[str, Any]) -> None:
    ranks.run(getattr(cases, case), device="cuda", timeout=90, **arguments)


def test_differing_models_are_named(ranks: World) -> None:
    if ranks.size == 1:
        pytest.skip("one GPU: NCCL has one rank, which differs from nobody")
    for message in ranks.run(cases.case_differing_models, device="cuda"):
        assert "[16, 8] on rank 0" in message


def test_durations_on_the_device(ranks: World) -> None:
    for data in ranks.run(cases.case_logging, device="cuda"):
        assert data["avg_backward_compute_time"] > 0


# --- streams

SLEEP = 500_000_000
"""Cycles that a stream is held up for: about a quarter of a second, far longer than the host takes to go on."""


class SideStreamWork:
    """A reduction on a stream of its own that is late, and triples instead of summing."""

    def __init__(self, storage: torch.Tensor) -> None:
        self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(SLEEP)
            storage.mul_(3)

    def wait(self) -> None:
        torch.cuda.current_stream().wait_stream(self.stream)


class LateTransport(ProcessGroupTransport):
    def all_reduce(self, storage: torch.Tensor) -> Any:
        return SideStreamWork(storage)


def late_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future:
    work = SideStreamWork(bucket.buffer())
    future: torch.futures.Future = torch.futures.Future(devices=[bucket.buffer().device])
    with torch.cuda.stream(work.stream):
        future.set_result(bucket.buffer())  # after what was put on the stream
    return future


def late_step(by_hook: bool, slow_gradients: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns the gradients as the current stream has them right after a late reduction, and local ones."""
    ddp = cases.wrap(MLP(), "cuda", bucket_cap_mb=0.002)
    x = torch.randn(5, 8, device="cuda")
    cases.backward(ddp, x)
    other = copy.deepcopy(ddp.module)
    other.zero_grad()
    cases.backward(other, x)
    ddp.zero_grad()
    if by_hook:
        ddp.register_comm_hook(None, late_hook)
    else:
        ddp.reducer.backend.transport = LateTransport(ddp.process_group, ddp.device)
    out = ddp(x)
    if slow_gradients:
        out.register_hook(lambda grad: torch.cuda._sleep(SLEEP))
    torch.cuda.synchronize()
    (out.abs() ** 2).mean().backward()
    found = [p.grad.clone() for p in ddp.parameters()]
    torch.cuda.synchronize()
    return found, [p.grad for p in other.parameters()]


def case_waits(rank: int, world_size: int, by_hook: bool, slow_gradients: bool) -> None:
    found, local = late_step(by_hook, slow_gradients)
    for mine, theirs in zip(found, local, strict=True):
        torch.testing.assert_close(mine, 3 * theirs)


def case_does_not_wait(rank: int, world_size: int, by_hook: bool) -> bool:
    """Leaves the wait out and says whether gradients came out wrong, without which the test above would say nothing."""
    if by_hook:
        FutureReduction.result = lambda self: self.future.value()  # type: ignore[method-assign]
    else:
        WorkReduction.result = lambda self: self.storage  # type: ignore[method-assign]
    found, local = late_step(by_hook, False)
    return not all(torch.allclose(mine, 3 * theirs) for mine, theirs in zip(found, local, strict=True))


@pytest.fixture
def one() -> Iterator[World]:
    world = World(1, backend="nccl")
    yield world
    world.stop()


def test_unpacking_waits_for_the_reduction(one: World) -> None:
    for by_hook in (False, True):
        for slow_gradients in (False, True):
            one.run(case_waits, by_hook=by_hook, slow_gradients=slow_gradients, timeout=60)


@pytest.mark.parametrize("by_hook", [False, True])
def test_without_the_wait_gradients_are_wrong(one: World, by_hook: bool) -> None:
    assert one.run(case_does_not_wait, by_hook=by_hook, timeout=60) == [True]


def case_side_stream(rank: int, world_size: int, view: bool) -> None:
    """Training on another stream than the one that the wrapper was made on, with late kernels in between."""
    ddp = cases.wrap(MLP(300, 3), "cuda", gradient_as_bucket_view=view, bucket_cap_mb=0.3)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            x = torch.randn(5, 8, device="cuda")
            ddp.zero_grad()
            expected = oracle(ddp.module, lambda m, x=x: cases.backward(m, x))
            torch.cuda._sleep(SLEEP // 10)
            cases.backward(ddp, x)
            assert_equals_oracle(ddp.module, expected)
    torch.cuda.synchronize()


@pytest.mark.parametrize("view", [False, True])
def test_training_on_a_side_stream(ranks: World, view: bool) -> None:
    ranks.run(case_side_stream, view=view)


class TwoDevices(nn.Module):
    def __init__(self, first: torch.device, second: torch.device) -> None:
        super().__init__()
        self.devices = first, second
        self.a, self.b = nn.Linear(8, 8).to(first), nn.Linear(8, 4).to(second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x.to(self.devices[0]))).to(self.devices[1]))


def case_two_devices(rank: int, world_size: int, view: bool) -> None:
    module = TwoDevices(torch.device("cuda", 2 * rank), torch.device("cuda", 2 * rank + 1))
    ddp = DistributedDataParallel(module, gradient_as_bucket_view=view)
    for _ in range(3):
        x = torch.randn(5, 8)
        check_step(ddp, lambda m, x=x: cases.backward(m, x))


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="two ranks of two GPUs each need four")
@pytest.mark.parametrize("view", [False, True])
def test_modules_over_several_gpus(view: bool) -> None:
    world = World(2)
    try:
        world.run(case_two_devices, view=view)
    finally:
        world.stop()


def case_bf16_bits(rank: int, world_size: int) -> None:
    """The hook's own arithmetic: at any world size the mean of bfloat16 gradients, summed by NCCL."""
    ddp = cases.wrap(MLP(), "cuda")
    ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
    x = torch.ones(5, 8, device="cuda")
    other = copy.deepcopy(ddp.module)
    cases.backward(other, x)
    cases.backward(ddp, x)
    for mine, theirs in zip(ddp.module.parameters(), other.parameters(), strict=True):
        expected = theirs.grad.bfloat16().float()  # equal on all ranks, so is the mean
        torch.testing.assert_close(mine.grad, expected, rtol=2**-7, atol=0)


def test_bf16_hook(ranks: World) -> None:
    ranks.run(case_bf16_bits)


# --- JAX on the same GPU


def test_jax_replicas_agree_with_torch_ranks(ranks: World) -> None:
    jax = pytest.importorskip("jax")
    try:
        jax.devices("gpu")
    except RuntimeError as error:
        pytest.skip(f"jax finds no GPU: {error}")
    jax_replicas.assert_agree(
        jax_replicas.jax_gradients("gpu", ranks.size), ranks.run(jax_replicas.case_torch, device="cuda")
    )
