"""Comm hooks: torch's own in versions that work on every backend, and those of `unified_ddp.hooks`."""

from unified_ddp.torch.comm_hooks.torchs import batched_powerSGD_hook as batched_powerSGD_hook
from unified_ddp.torch.comm_hooks.torchs import quantization_perchannel_hook as quantization_perchannel_hook
from unified_ddp.torch.comm_hooks.torchs import quantization_pertensor_hook as quantization_pertensor_hook
from unified_ddp.torch.comm_hooks.zero import hook_with_zero_step as hook_with_zero_step
from unified_ddp.torch.comm_hooks.zero import hook_with_zero_step_interleaved as hook_with_zero_step_interleaved
