"""The PyTorch adapter: DistributedDataParallel with our own reducer, over any torch.distributed backend."""

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError("unified_ddp.torch needs PyTorch; install it with: pip install 'unified_ddp[torch]'") from error

from unified_ddp.torch.comm_hooks.shared import HookState, shared_hook
from unified_ddp.torch.ddp import DistributedDataParallel
from unified_ddp.torch.install import Installation, install
from unified_ddp.torch.loading import loading
from unified_ddp.torch.module.sync_batchnorm import SyncBatchNorm
from unified_ddp.torch.reduction.bucket import GradBucket

__all__ = [
    "DistributedDataParallel",
    "GradBucket",
    "HookState",
    "Installation",
    "SyncBatchNorm",
    "install",
    "loading",
    "shared_hook",
]
