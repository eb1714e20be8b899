"""One torch rank: trains under DistributedDataParallel and, next to it, a plain copy that knows no reduction."""

import copy
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import unified_ddp
from unified_ddp.equivalence.demo.config import Side, VerifyConfig
from unified_ddp.equivalence.demo.data import SGD_MOMENTUM, Shards
from unified_ddp.equivalence.demo.exchange import Exchange, StepRecord
from unified_ddp.equivalence.demo.faults import break_process, faulty_hook
from unified_ddp.torch import DistributedDataParallel, HookState, shared_hook
from unified_ddp.torch.equivalence.demo_model import make_model


def run_rank(exchange: Exchange, config: VerifyConfig, rank: int) -> None:
    """Trains one rank to the end and records each step."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{Path(exchange.directory, 'rendezvous')}",
        rank=rank,
        world_size=config.world_size,
        timeout=timedelta(seconds=config.timeout),
    )
    if rank == 0:
        exchange.put_versions(Side.TORCH, {"torch": torch.__version__, "unified_ddp": unified_ddp.__version__})
    shards, weights = exchange.wait_for_inputs()
    _Trainer(config, rank, weights).train(exchange, shards)
    dist.destroy_process_group()


class _Trainer:
    def __init__(self, config: VerifyConfig, rank: int, weights: dict[str, np.ndarray]) -> None:
        self.config, self.rank = config, rank
        self.model = make_model(weights, config.dtype)
        self.plain = copy.deepcopy(self.model)
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=config.bucket_cap_mb)
        self.momentum = [torch.zeros_like(param) for param in self.model.parameters()]

    def train(self, exchange: Exchange, shards: Shards) -> None:
        images, labels = torch.from_numpy(shards.images), torch.from_numpy(shards.labels).long()
        self._settle_buckets(images[0, self.rank], labels[0, self.rank])
        exchange.put_plan(Side.TORCH, self.rank, self.ddp.plan)
        for step in range(self.config.steps):
            break_process(self.config, Side.TORCH, self.rank, step)
            exchange.put_step(Side.TORCH, self.rank, step, self._step(images[step, self.rank], labels[step, self.rank]))

    def _settle_buckets(self, images: Tensor, labels: Tensor) -> None:
        """The first backward only shows in which order gradients become ready; buckets are rebuilt once after it."""
        before = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        for _ in range(2):
            self._backward(self.ddp, images, labels)
        self.ddp.zero_grad()
        for name, buffer in self.model.named_buffers():
            buffer.copy_(before[name])
        if hook := faulty_hook(self.config, Side.TORCH):
            self.ddp.register_comm_hook(HookState(hook), shared_hook)

    def _step(self, images: Tensor, labels: Tensor) -> StepRecord:
        self._align_plain()
        self.plain.zero_grad()
        self._backward(self.plain, images, labels)
        self.ddp.zero_grad()
        loss = self._backward(self.ddp, images, labels)
        record = StepRecord(
            loss,
            reduced=_gradients(self.model),
            local=_gradients(self.plain),
            buffers=_arrays(self.model.named_buffers()),
            plain_buffers=_arrays(self.plain.named_buffers()),
        )
        self._update()
        return record

    def _update(self) -> None:
        """Momentum SGD as on the JAX side; torch.optim would load torch's compiler, two seconds a rank."""
        with torch.no_grad():
            for param, momentum in zip(self.model.parameters(), self.momentum, strict=True):
                assert param.grad is not None  # _gradients has seen to it
                momentum.mul_(SGD_MOMENTUM).add_(param.grad)
                param.sub_(momentum, alpha=self.config.learning_rate)

    def _align_plain(self) -> None:
        """Gives the plain copy this rank's weights and rank 0's buffers, by means that are not those under test."""
        with torch.no_grad():
            for copied, param in zip(self.plain.parameters(), self.model.parameters(), strict=True):
                copied.copy_(param)
            for kept, buffer in zip(self.plain.buffers(), self.model.buffers(), strict=True):
                kept.copy_(buffer)
                dist.broadcast(kept, 0)

    def _backward(self, model: nn.Module, images: Tensor, labels: Tensor) -> float:
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        return loss.item()


def _gradients(model: nn.Module) -> dict[str, np.ndarray]:
    missing = [name for name, param in model.named_parameters() if param.grad is None]
    if missing:
        raise RuntimeError(f"after backward the parameters {missing} hold no gradient")
    return _arrays((name, param.grad) for name, param in model.named_parameters() if param.grad is not None)


def _arrays(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, np.ndarray]:
    return {name: tensor.detach().numpy().copy() for name, tensor in tensors}
