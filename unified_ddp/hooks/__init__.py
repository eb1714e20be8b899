"""Comm hooks written once for torch and JAX: the same hook gives the same numbers in both adapters."""

from unified_ddp.hooks.basic import AllReduce as AllReduce
from unified_ddp.hooks.basic import Compressed as Compressed
from unified_ddp.hooks.basic import Noop as Noop
from unified_ddp.hooks.collectives import Gather as Gather
from unified_ddp.hooks.collectives import Sum as Sum
from unified_ddp.hooks.lossy import LossyHook as LossyHook
from unified_ddp.hooks.powersgd import PowerSGD as PowerSGD
from unified_ddp.hooks.protocol import BucketLayout as BucketLayout
from unified_ddp.hooks.protocol import HookBucket as HookBucket
from unified_ddp.hooks.protocol import SharedHook as SharedHook
from unified_ddp.hooks.quantize import Quantize8 as Quantize8
from unified_ddp.hooks.topk import TopK as TopK

__all__ = [
    "AllReduce",
    "BucketLayout",
    "Compressed",
    "Gather",
    "HookBucket",
    "LossyHook",
    "Noop",
    "PowerSGD",
    "Quantize8",
    "SharedHook",
    "Sum",
    "TopK",
]
