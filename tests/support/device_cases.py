"""Cases that hold on any device and backend: run on the CPU by test_devices, on GPUs by test_gpu."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel.distributed import _MixedPrecision

from support.models import MLP, Checkpointed, ConvNet, Mixed, TiedEmbedding, TwoHeads
from support.oracle import assert_equals_oracle, check_step, mean_over_ranks, oracle
from unified_ddp.torch import DistributedDataParallel


def convolutions() -> nn.Module:
    """Without batch norm, whose buffers would have to be lowered, too, in mixed precision."""
    layers = [nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 6, 3), nn.Tanh(), nn.Conv2d(6, 4, 3), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(64, 4)).to(memory_format=torch.channels_last)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "mlp": (MLP, lambda: torch.randn(5, 8)),
    "large parameters": (lambda: MLP(300, 3), lambda: torch.randn(5, 8)),
    "conv and batch norm": (ConvNet, lambda: torch.randn(5, 64)),
    "channels_last": (lambda: ConvNet(channels_last=True), lambda: torch.randn(5, 64)),
    "convolutions, channels_last": (convolutions, lambda: torch.randn(5, 64)),
    "mixed dtypes, complex": (Mixed, lambda: torch.randn(5, 8)),
    "tied embedding": (TiedEmbedding, lambda: torch.randint(0, 20, (5, 3))),
    "sparse embedding": (lambda: TiedEmbedding(sparse=True), lambda: torch.randint(0, 20, (5, 3))),
    "reentrant checkpoint": (lambda: Checkpointed(reentrant=True), lambda: torch.randn(5, 8)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "small buckets": {"bucket_cap_mb": 0.0005},
    "small buckets, views": {"bucket_cap_mb": 0.0005, "gradient_as_bucket_view": True},
    "views, static graph": {"gradient_as_bucket_view": True, "static_graph": True},
    "find unused": {"find_unused_parameters": True, "bucket_cap_mb": 0.0005},
}
HOOKS: dict[str, tuple[Callable[[], Any], Callable[..., Any], float]] = {
    "allreduce": (lambda: None, default_hooks.allreduce_hook, 1e-5),
    "fp16": (lambda: None, default_hooks.fp16_compress_hook, 2e-3),
    "bf16": (lambda: None, default_hooks.bf16_compress_hook, 2e-2),
    "bf16 wrapper": (lambda: None, default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook), 2e-2),
    "power sgd": (
        lambda: powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=16, start_powerSGD_iter=2),
        powerSGD_hook.powerSGD_hook,
        1e-3,
    ),
    "batched power sgd": (
        lambda: powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=16, start_powerSGD_iter=2),
        powerSGD_hook.batched_powerSGD_hook,
        1e-3,
    ),
}


def device_of(device: str) -> torch.device:
    """The rank's device: with NCCL its own GPU, which is the current one."""
    if device == "cuda":
        torch.backends.cudnn.allow_tf32 = False
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(device)


def wrap(module: nn.Module, device: str, **options: Any) -> DistributedDataParallel:
    where = device_of(device)
    device_ids = [where.index] if where.type == "cuda" else None
    return DistributedDataParallel(module.to(where), device_ids=device_ids, **options)


def backward(module: nn.Module, x: torch.Tensor) -> None:
    (module(x).abs() ** 2).mean().backward()


def case_training(rank: int, world_size: int, device: str, model: str, options: str) -> None:
    make, data = MODELS[model]
    ddp = wrap(make(), device, **OPTIONS[options])
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for _ in range(4):
        x = data().to(device_of(device))
        optimizer.zero_grad()
        expected = oracle(ddp.module, lambda m, x=x: backward(m, x))
        backward(ddp, x)
        assert_equals_oracle(ddp.module, expected)
        optimizer.step()


def case_no_sync(rank: int, world_size: int, device: str, options: str) -> None:
    ddp = wrap(MLP(), device, **OPTIONS[options])
    for _ in range(3):
        batches = [torch.randn(5, 8, device=device_of(device)) for _ in range(3)]
        ddp.zero_grad()
        expected = oracle(ddp.module, lambda m, b=batches: [backward(m, x) for x in b])
        with ddp.no_sync():
            for x in batches[:2]:
                backward(ddp, x)
        backward(ddp, batches[2])
        assert_equals_oracle(ddp.module, expected)


def case_unused(rank: int, world_size: int, device: str, skip: bool) -> None:
    ddp = wrap(TwoHeads(), device, skip_all_reduce_unused_params=skip, **OPTIONS["find unused"])
    for heads in ["ll", "lr", "rl", "rr"]:
        x = torch.randn(5, 8, device=device_of(device))
        mine = heads[rank % 2]
        check_step(ddp, lambda m, x=x, mine=mine: sum(v.pow(2).sum() for v in m(x, mine).values()).backward())


def case_mixed_precision(rank: int, world_size: int, device: str, dtype: str, model: str) -> None:
    low = getattr(torch, dtype)
    make, data = MODELS[model]
    config = _MixedPrecision(param_dtype=low, reduce_dtype=torch.float32)
    ddp = wrap(make(), device, mixed_precision=config, bucket_cap_mb=0.002)
    for _ in range(3):
        batches = [data().to(device_of(device)) for _ in range(2)]
        ddp.zero_grad()
        expected = oracle(ddp.module, lambda m, b=batches: [backward(m, x) for x in b])
        with ddp.no_sync():
            backward(ddp, batches[0])
        backward(ddp, batches[1])
        assert all(p.dtype is p.grad.dtype is torch.float32 for p in ddp.parameters())
        assert_equals_oracle(ddp.module, expected, 0.05)


class Squares(nn.Module):
    """Parameters of 16 x 16, each a bucket under a cap of 1 KiB: PowerSGD of rank 16 loses nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def case_hook(rank: int, world_size: int, device: str, hook: str, view: bool) -> None:
    state, function, k = HOOKS[hook]
    ddp = wrap(Squares(), device, bucket_cap_mb=1 / 1024, gradient_as_bucket_view=view)
    ddp.register_comm_hook(state(), function)
    for _ in range(5):
        x = torch.randn(32, 16, device=device_of(device))
        check_step(ddp, lambda m, x=x: backward(m, x), k)


def case_quantized(rank: int, world_size: int, device: str) -> None:
    ddp = wrap(Squares(), device)
    ddp.register_comm_hook(None, quantization_hooks.quantization_perchannel_hook)
    x = torch.randn(32, 16, device=device_of(device))
    expected = oracle(ddp.module, lambda m: backward(m, x))
    backward(ddp, x)
    largest = max(p.grad.abs().max().item() for p in ddp.parameters())
    for name, p in ddp.module.named_parameters():
        # half of 255 levels over twice the largest value, and ranks' largest values are not the mean's
        assert (p.grad - expected[name]).abs().max().item() <= 3 * largest / 255, name


def case_optimizer_in_backward(rank: int, world_size: int, device: str, view: bool) -> None:
    torch.manual_seed(5)
    module = MLP().to(device_of(device))
    other = copy.deepcopy(module)
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.05})
    ddp = wrap(module, device, gradient_as_bucket_view=view, bucket_cap_mb=0.002)
    expected = torch.optim.SGD(other.parameters(), lr=0.05)
    for _ in range(4):
        x = torch.randn(5, 8, device=device_of(device))
        expected.zero_grad()
        backward(other, x)
        for p in other.parameters():
            mean = mean_over_ranks(p.grad, p)
            assert mean is not None
            p.grad = mean.to(p.dtype)
        expected.step()
        backward(ddp, x)
        for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
            assert mine.grad is None


def case_differing_models(rank: int, world_size: int, device: str) -> str:
    """The check at construction sends the whole description only if ranks differ."""
    try:
        wrap(MLP(width=16 + rank), device)
    except RuntimeError as error:
        dist.barrier(**({"device_ids": [torch.cuda.current_device()]} if dist.get_backend() == "nccl" else {}))
        return str(error)
    return "no error"


def case_logging(rank: int, world_size: int, device: str) -> dict[str, Any]:
    ddp = wrap(MLP(), device)
    for _ in range(4):
        backward(ddp, torch.randn(5, 8, device=device_of(device)))
    return ddp._get_ddp_logging_data()
