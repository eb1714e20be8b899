"""SyncBatchNorm on CPUs, where torch's own layer refuses to run."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class SyncBatchNorm(nn.SyncBatchNorm):
    """torch's `SyncBatchNorm`, on CPUs over gloo, too: batch norm over the batches of all ranks.

    Forward and backward are those of `BatchNorm` in one process with the whole batch. Ranks may have different batch
    sizes, also none. On other devices than CPUs torch's implementation runs. As there, ranks synchronise in training
    mode only, over `process_group`, by default all ranks.
    """

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: dist.ProcessGroup | None = None) -> nn.Module:
        """Returns `module` with each `BatchNorm*D` replaced by this layer, over the same parameters and buffers."""
        return adopt_sync_batchnorm(nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalises `input`, of shape (batch, channels, ...).

        Raises:
            ValueError: it has no channel dimension, or all ranks together hold fewer than two values a channel.
        """
        group = self.process_group or dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if input.device.type != "cpu" or not self.training or group is None:
            return super().forward(input)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        mean, var, count = _statistics(input.detach(), group)
        if self.track_running_stats:
            self._update_running(mean, var * (count / (count - 1)))
        return _Normalize.apply(input, self.weight, self.bias, mean, var, self.eps, count, group)

    @torch.no_grad()
    def _update_running(self, mean: torch.Tensor, unbiased_var: torch.Tensor) -> None:
        assert self.num_batches_tracked is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        self.num_batches_tracked.add_(1)
        factor = self.momentum if self.momentum is not None else 1.0 / self.num_batches_tracked.item()
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(unbiased_var.to(self.running_var.dtype), factor)


def adopt_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Makes torch's SyncBatchNorm layers in `module` ours, in place: their class changes, nothing else. Returns it.

    Raises:
        ValueError: there is another class derived from torch's layer that does not bring its own `forward`.
    """
    for name, layer in module.named_modules():
        if type(layer) is nn.SyncBatchNorm:
            layer.__class__ = SyncBatchNorm
        elif isinstance(layer, nn.SyncBatchNorm) and type(layer).forward is nn.SyncBatchNorm.forward:
            raise ValueError(
                f"layer {name!r} is a {type(layer).__qualname__}, derived from torch.nn.SyncBatchNorm, which does not "
                "run on CPUs; derive it from unified_ddp.torch.SyncBatchNorm"
            )
    return module


def _statistics(x: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Returns mean, biased variance (shape (channels,), at least float32) and number of values a channel, of all ranks.

    Each rank's own mean and variance are combined, not sums of squares, which would cancel if means are large.
    """
    channels = x.shape[1]
    mine = torch.zeros(2 * channels + 1, dtype=torch.float64)
    if x.numel():
        var, mean = torch.var_mean(_wide(x), dim=_all_but_channels(x), correction=0)
        mine = torch.cat([mean.double(), var.double(), mine.new_tensor([x.numel() // channels])])
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    means, variances, counts = torch.stack(every).split([channels, channels, 1], dim=1)
    count = int(counts.sum())
    if count < 2:
        raise ValueError(f"expected more than 1 value per channel when training, got {count} on all ranks together")
    mean = (counts * means).sum(0) / count
    var = (counts * (variances + (means - mean) ** 2)).sum(0) / count
    return mean.to(_wide(x[:0]).dtype), var.to(_wide(x[:0]).dtype), count


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _all_but_channels(x: torch.Tensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


class _Normalize(torch.autograd.Function):
    """Normalises by given statistics of all ranks' batches, and differentiates through them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        var: torch.Tensor,
        eps: float,
        count: int,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(var + eps))
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.count, ctx.group = count, group
        if not x.numel():
            return torch.empty_like(x)
        weight, bias = (None if t is None else t.to(mean.dtype) for t in (weight, bias))
        return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, invstd = ctx.saved_tensors
        shape = [1, -1] + [1] * (x.dim() - 2)
        dy, centred = _wide(grad), _wide(x) - mean.view(shape)
        dims = _all_but_channels(x)
        sums = torch.stack([dy.sum(dims), (dy * centred).sum(dims)])
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_weight = (sums[1] * invstd).to(weight.dtype) if weight is not None and need_weight else None
        grad_bias = sums[0].to(ctx.bias_dtype) if ctx.bias_dtype is not None and need_bias else None
        grad_x = None
        if need_x:
            everyones = sums.clone()  # what the other parameters' gradients are made of stays this rank's
            dist.all_reduce(everyones, group=ctx.group)
            mean_dy, slope = (everyones / ctx.count).unbind()
            scale = invstd if weight is None else invstd * weight
            grad_x = dy - mean_dy.view(shape) - centred * (slope * invstd**2).view(shape)
            grad_x = (grad_x * scale.view(shape)).to(x.dtype)
        return grad_x, grad_weight, grad_bias, None, None, None, None, None
