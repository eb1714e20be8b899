"""DistributedDataParallel for JAX: gradients of any pytree, averaged over a mapped axis bucket by bucket."""

try:
    import jax  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in {"jax", "jaxlib"}:
        raise
    raise ImportError("unified_ddp.jax needs JAX; install it with: pip install unified_ddp[jax]") from error

from unified_ddp.jax.comm_hooks.function import CommHook, JaxBucket
from unified_ddp.jax.ddp import DistributedDataParallel
from unified_ddp.jax.launch import initialize
from unified_ddp.jax.optimizer import all_reduce_gradients, varying
from unified_ddp.jax.pytrees.schema import param_specs
from unified_ddp.jax.step.placement import pad_batch
from unified_ddp.jax.step.state import TrainState
from unified_ddp.jax.step.train_step import TrainStep

__all__ = [
    "CommHook",
    "DistributedDataParallel",
    "JaxBucket",
    "TrainState",
    "TrainStep",
    "all_reduce_gradients",
    "initialize",
    "pad_batch",
    "param_specs",
    "varying",
]
