"""The data, the shards and the initial weights that both frameworks share, all numpy."""

import math
from dataclasses import dataclass

import numpy as np

from unified_ddp.equivalence.demo.config import VerifyConfig, VerifyError

# A conv net for 1x8x8 images under torch's names and shapes. No conv bias: batch norm cancels it, so its gradient would
# be rounding noise around zero, of which no relative difference is meaningful.
PARAMS: dict[str, tuple[int, ...]] = {
    "conv1.weight": (8, 1, 3, 3),
    "bn1.weight": (8,),
    "bn1.bias": (8,),
    "conv2.weight": (16, 8, 3, 3),
    "bn2.weight": (16,),
    "bn2.bias": (16,),
    "fc1.weight": (32, 256),
    "fc1.bias": (32,),
    "fc2.weight": (10, 32),
    "fc2.bias": (10,),
}
BUFFERS: dict[str, tuple[int, ...]] = {
    f"bn{i}.{stat}": shape
    for i, width in ((1, 8), (2, 16))
    for stat, shape in (("running_mean", (width,)), ("running_var", (width,)), ("num_batches_tracked", ()))
}
BN_MOMENTUM = 0.1  # torch's convention: the weight of the new statistics
BN_EPSILON = 1e-5
SGD_MOMENTUM = 0.9


@dataclass(frozen=True)
class Shards:
    """What each rank sees in each step.

    Attributes:
        images: (steps, world size, batch, 1, 8, 8) of the run's dtype, 0 to 1.
        labels: (steps, world size, batch), int32.
    """

    images: np.ndarray
    labels: np.ndarray


def make_shards(config: VerifyConfig) -> Shards:
    """Deals scikit-learn's 1,797 handwritten digits out, epoch by epoch, each shuffled by the seed.

    Raises:
        VerifyError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise VerifyError(
            "the digits data comes with scikit-learn, which is not installed; run: pip install 'unified_ddp[verify]'"
        ) from error
    digits = load_digits()
    rng = np.random.default_rng(config.seed)
    needed = config.steps * config.world_size * config.batch_size
    epochs = math.ceil(needed / len(digits.target))
    order = np.concatenate([rng.permutation(len(digits.target)) for _ in range(epochs)])[:needed]
    head = (config.steps, config.world_size, config.batch_size)
    images = (digits.images[order] / 16.0).astype(config.dtype)
    return Shards(images.reshape(*head, 1, 8, 8), digits.target[order].astype(np.int32).reshape(head))


def initial_weights(config: VerifyConfig) -> dict[str, np.ndarray]:
    """Returns He-normal weights, unit batch-norm scales and zero biases by name; drawn in float64, then rounded."""
    rng = np.random.default_rng([config.seed, 1])
    return {name: _initial(name, shape, rng).astype(config.dtype) for name, shape in PARAMS.items()}


def _initial(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    if name.endswith("bias"):
        return np.zeros(shape)
    if name.startswith("bn"):
        return np.ones(shape)
    return rng.standard_normal(shape) * math.sqrt(2 / math.prod(shape[1:]))
