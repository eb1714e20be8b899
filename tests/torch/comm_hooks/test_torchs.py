"""Everything in torch.distributed.algorithms.ddp_comm_hooks, on gloo, with several buckets."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import MLP
from support.oracle import assert_equals_oracle, check_step, local_copy, oracle
from torch import nn
from torch.distributed.algorithms import ddp_comm_hooks
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    mixed_precision_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _MixedPrecision

from unified_ddp.torch import DistributedDataParallel, comm_hooks
from unified_ddp.torch.comm_hooks import torchs

CAPS = [None, 0.001]


def backward(module: nn.Module, x: torch.Tensor) -> None:
    module(x).pow(2).mean().backward()


def steps(ddp: DistributedDataParallel, k: float, count: int = 4) -> None:
    for _ in range(count):
        x = torch.randn(5, 8)
        check_step(ddp, lambda m, x=x: backward(m, x), k)


QUANTIZED: dict[str, Callable[..., Any]] = {
    "per tensor": quantization_hooks.quantization_pertensor_hook,
    "per channel": quantization_hooks.quantization_perchannel_hook,
    "channels of 64": functools.partial(quantization_hooks.quantization_perchannel_hook, bucket_size=64),
    "ours": comm_hooks.quantization_pertensor_hook,
}


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(x.to(torch.complex64) @ self.weight)


def quantization_error(module: nn.Module, run: Callable[[nn.Module], None]) -> float:
    """Half a level of each rank's gradients, averaged; every bucket's range is within the one of all of them."""
    other = local_copy(module)
    other.zero_grad()
    run(other)
    grads = [p.grad for p in other.parameters() if p.grad is not None]
    flat = torch.cat([(torch.view_as_real(g) if g.is_complex() else g).reshape(-1) for g in grads])
    half = torch.stack([flat.clamp(min=0).max() - flat.clamp(max=0).min()]) / 255 / 2
    dist.all_reduce(half)
    return half.item() / dist.get_world_size()


def case_quantized(rank: int, world_size: int, hook: str, cap: float | None, make: str) -> None:
    ddp = DistributedDataParallel({"mlp": MLP, "complex": Complex}[make](), bucket_cap_mb=cap)
    ddp.register_comm_hook(None, QUANTIZED[hook])
    for _ in range(3):
        x = torch.randn(5, 8)
        ddp.zero_grad()
        expected = oracle(ddp.module, lambda m, x=x: backward(m, x))
        bound = 1.01 * quantization_error(ddp.module, lambda m, x=x: backward(m, x))
        backward(ddp, x)
        differs = False
        for name, p in ddp.module.named_parameters():
            difference = torch.atleast_1d(p.grad.to(expected[name].dtype) - expected[name])
            parts = torch.view_as_real(difference) if difference.is_complex() else difference
            assert parts.abs().max().item() <= bound, name
            differs = differs or bool((parts.abs() > bound / 100).any())
        assert differs  # it did go through 8 bits


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize(
    ("hook", "make"), [*((h, "mlp") for h in QUANTIZED), ("per tensor", "complex"), ("channels of 64", "complex")]
)
def test_quantization(world: Callable[[int], Any], hook: str, cap: float | None, make: str) -> None:
    world(2).run(case_quantized, hook=hook, cap=cap, make=make)


class Squares(nn.Module):
    """Parameters of 16 x 16, each a bucket under a cap of 1 KiB: PowerSGD of rank 16 loses nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4))
        self.first.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def case_power_sgd(rank: int, world_size: int, hook: str, cap: float | None, view: bool) -> None:
    """Nothing is lost if the rank is the matrix's: its size, or one for each sample of all ranks."""
    function, samples, approximation, k = {
        "power": (powerSGD_hook.powerSGD_hook, 32, 16, 1e-3),
        "power, few samples": (powerSGD_hook.powerSGD_hook, 1, 2, 1e-3),
        "batched": (powerSGD_hook.batched_powerSGD_hook, 32, 16, 1e-3),
    }[hook]
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=approximation, start_powerSGD_iter=2, min_compression_rate=0.1
    )
    ddp = DistributedDataParallel(Squares(), bucket_cap_mb=cap, gradient_as_bucket_view=view)
    ddp.register_comm_hook(state, function)
    for _ in range(5):
        x = torch.randn(samples, 8)
        check_step(ddp, lambda m, x=x: backward(m, x), k)
    assert len(ddp.plan.buckets) == (1 if cap is None else 4)
    assert state.total_numel_after_compression > 0


@pytest.mark.parametrize(
    ("hook", "cap", "view"),
    [
        ("power", 1 / 1024, False),
        ("power", 1 / 1024, True),
        ("power", None, False),
        ("power, few samples", 1 / 1024, False),
        ("batched", 1 / 1024, False),
        ("batched", 1 / 1024, True),
    ],
)
def test_power_sgd_of_full_rank(world: Callable[[int], Any], hook: str, cap: float | None, view: bool) -> None:
    world(2).run(case_power_sgd, hook=hook, cap=cap, view=view, timeout=40)


def case_lossy(rank: int, world_size: int, wrapped: bool) -> None:
    """What rank 1 leaves of a gradient depends on its start: the same bits as with torch's class, in one bucket."""
    hook = powerSGD_hook.powerSGD_hook
    found = []
    for cls in (TorchDDP, DistributedDataParallel):
        torch.manual_seed(3)
        ddp = cls(MLP())
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, default_hooks.fp16_compress_wrapper(hook) if wrapped else hook)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        torch.manual_seed(100 + rank)
        for _ in range(6):
            optimizer.zero_grad()
            backward(ddp, torch.randn(5, 8))
            optimizer.step()
        found.append([p.detach().clone() for p in ddp.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("wrapped", [False, True])
def test_power_sgd_gives_torchs_bits(world: Callable[[int], Any], wrapped: bool) -> None:
    world(2).run(case_lossy, wrapped=wrapped)


def case_rank_too_large(rank: int, world_size: int) -> str:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=20, start_powerSGD_iter=2)
    ddp = DistributedDataParallel(Squares(), bucket_cap_mb=1 / 1024)
    ddp.register_comm_hook(state, powerSGD_hook.batched_powerSGD_hook)
    backward(ddp, torch.randn(5, 8))  # one bucket of 32 x 32, before the buckets are rebuilt
    with pytest.raises(ValueError, match="matrix_approximation_rank=20") as caught:
        backward(ddp, torch.randn(5, 8))
    return str(caught.value)


def test_batched_power_sgd_names_a_rank_too_large(world: Callable[[int], Any]) -> None:
    for message in world(2).run(case_rank_too_large):
        assert "16 x 16" in message


def case_every_kind(rank: int, world_size: int) -> None:
    """As torch's enumeration registers them; those that lose much are only held to be equal on all ranks."""
    k = {"ALLREDUCE": 1e-5, "FP16_COMPRESS": 2e-3, "BF16_COMPRESS": 2e-2}
    for kind in ddp_comm_hooks.DDPCommHookType:
        ddp = DistributedDataParallel(MLP(), bucket_cap_mb=0.001)
        ddp_comm_hooks.register_ddp_comm_hook(kind, ddp)
        for _ in range(3):
            backward(ddp, torch.randn(5, 8))
        if kind.name in k:
            steps(ddp, k[kind.name], 2)
        everybodys = [torch.empty(40, 8) for _ in range(world_size)]
        dist.all_gather(everybodys, ddp.module.layers[0].weight.grad.contiguous())
        assert torch.equal(everybodys[0], everybodys[1]) == (kind.name != "NOOP"), kind


def test_every_kind_of_torchs_enumeration(world: Callable[[int], Any]) -> None:
    world(2).run(case_every_kind)


def case_post_local_sgd(rank: int, world_size: int, afterwards: bool) -> None:
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    state = post_localSGD_hook.PostLocalSGDState(None, alone, 2, post_local_gradient_allreduce=afterwards)
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=0.001)
    ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    steps(ddp, 1e-5, 2)
    for _ in range(2):  # from here on within the subgroup: this rank only
        x = torch.randn(5, 8)
        other = local_copy(ddp.module)
        for module in (other, ddp):
            module.zero_grad()
            backward(module, x)
        for mine, theirs in zip(ddp.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("afterwards", [True, False])
def test_post_local_sgd(world: Callable[[int], Any], afterwards: bool) -> None:
    world(2).run(case_post_local_sgd, afterwards=afterwards)


def case_upcast(rank: int, world_size: int) -> None:
    """Ours needs no hook for mixed precision; torch's may be registered all the same, and changes nothing."""
    import weakref

    config = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ddp = DistributedDataParallel(MLP(), mixed_precision=config)
    state = SimpleNamespace(ddp_weakref=weakref.ref(ddp), upcast_stream=None)
    ddp.register_comm_hook(state, mixed_precision_hooks._reducer_allreduce_and_upcast_hook)
    x = torch.randn(5, 8)
    expected = oracle(ddp.module, lambda m: backward(m, x))
    backward(ddp, x)
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in ddp.parameters())
    assert_equals_oracle(ddp.module, expected, 0.03)


def test_mixed_precisions_own_hook(world: Callable[[int], Any]) -> None:
    world(2).run(case_upcast)


def case_wrapped(rank: int, world_size: int) -> str:
    ddp = DistributedDataParallel(MLP())
    with pytest.raises(ValueError, match="fails on the gloo backend") as caught:
        ddp.register_comm_hook(
            None, default_hooks.fp16_compress_wrapper(quantization_hooks.quantization_pertensor_hook)
        )
    ddp.register_comm_hook(None, default_hooks.fp16_compress_wrapper(comm_hooks.quantization_pertensor_hook))
    backward(ddp, torch.randn(5, 8))
    return str(caught.value)


def test_a_hook_that_cannot_be_replaced_is_named(world: Callable[[int], Any]) -> None:
    for message in world(2).run(case_wrapped):
        assert "unified_ddp.torch.comm_hooks.quantization_pertensor_hook" in message


def test_both_versions_of_quantization_send_the_same_levels() -> None:
    """Ours and torch's formulas for scale and zero point agree."""
    observer = torch.ao.quantization.MinMaxObserver()
    for values in (torch.randn(100), torch.rand(50) + 3, -torch.rand(50), torch.zeros(4)):
        observer.reset_min_max_vals()
        observer(values)
        scale, zero = observer.calculate_qparams()
        levels = quantization_hooks._quantize_per_tensor_backend(values, scale, zero)
        sent = torchs.quantize(values.view(1, -1))
        torch.testing.assert_close(sent.scale.view(-1), scale.view(-1))
        assert torch.equal(sent.levels.view(-1), levels)
