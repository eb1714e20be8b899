"""What a comparison needs of one model in one framework: a few functions from numpy arrays to numpy arrays.

A side holds a program, not a state: every call is given the weights, by the side's own names, and leaves the user's
model as it was. All values are numpy arrays (bfloat16 by ml_dtypes), and `dtype` is the real dtype that floating-point
weights and inputs are given in; complex ones take the complex dtype of that precision.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from unified_ddp.equivalence.results import BucketTime, SideInfo

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class TensorInfo:
    """One parameter or buffer.

    Attributes:
        name: torch's, such as "conv1.weight"; in JAX the pytree's path joined with dots, such as "conv1.kernel".
        shape: of the tensor.
        dtype: canonical numpy or ml_dtypes name.
        buffer: module state that is saved but not trained.
        owner: path of the module that holds it; "" for the root.
        owner_type: full name of the module's type, such as "torch.nn.modules.linear.Linear"; "" if not known (pytrees).
        key: its name within the owner, such as "weight".
        aliases: where else the module holds the same tensor (tied).
        options: what the owner's rules depend on, such as {"groups": 2, "num_heads": 4}.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    buffer: bool = False
    owner: str = ""
    owner_type: str = ""
    key: str = ""
    aliases: tuple["TensorInfo", ...] = ()
    options: dict[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Evaluation:
    """One forward and backward.

    Attributes:
        outputs: by key: the path within what the loss function returned, joined with dots; "output" for one array.
        loss: scalar array.
        gradients: by parameter; steepest ascent, so complex ones are as torch has them (JAX's are conjugated). A
            parameter without gradient has zeros.
        buffers: after the forward.
        unused: parameters to which no gradient came.
    """

    outputs: Arrays
    loss: np.ndarray
    gradients: Arrays
    buffers: Arrays
    unused: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reduction:
    """One backward on several ranks through the side's real layer.

    Attributes:
        reduced: by rank, the gradients after the reduction; one set alone if they are those of all ranks.
        local: by rank, the gradients that plain autograd gives on that rank's shard.
        buckets: names by bucket, in order of storage.
        timeline: when buckets were ready and reduced; may be empty.
    """

    reduced: tuple[Arrays, ...]
    local: tuple[Arrays, ...]
    buckets: tuple[tuple[str, ...], ...]
    timeline: tuple[BucketTime, ...] = ()


@dataclass(frozen=True)
class Trajectory:
    """Free-running training: one entry a step.

    Attributes:
        losses: before each update.
        parameters: after each update.
        buffers: after each update.
    """

    losses: tuple[float, ...]
    parameters: tuple[Arrays, ...]
    buffers: tuple[Arrays, ...]


class Side(Protocol):
    """One model in one framework. Implemented by `TorchSide` and `JaxSide`."""

    @property
    def framework(self) -> str:
        """Returns "torch" or "jax"."""

    def tensors(self) -> tuple[TensorInfo, ...]:
        """Returns parameters and saved buffers, tied ones once, in order of definition."""

    def values(self) -> Arrays:
        """Returns the weights and buffers that the user's model holds."""

    def randomness(self, values: Arrays, batch: Any) -> str:
        """Returns what makes two runs on equal inputs differ, such as dropout; "" if nothing does."""

    def evaluate(self, values: Arrays, batch: Any, dtype: str, *, gradients: bool = True) -> Evaluation:
        """Runs forward, loss and backward on one batch."""

    def reduce(
        self, values: Arrays, shards: Sequence[Any], dtype: str, buckets: Sequence[Sequence[str]] | None = None
    ) -> Reduction:
        """Runs a backward on as many ranks as there are shards, through the real layer, in these buckets if given."""

    def update(self, values: Arrays, gradients: Sequence[Arrays], dtype: str) -> tuple[Arrays, ...]:
        """Gives the optimizer these gradients, one set a step, and returns the parameters after each step."""

    def train(self, values: Arrays, batches: Sequence[Any], dtype: str) -> Trajectory:
        """Trains freely, one batch a step."""

    @property
    def has_optimizer(self) -> bool:
        """Says whether `update` and `train` can be called."""

    def info(self) -> SideInfo:
        """Returns versions and settings."""


class SteppedSide(Side, Protocol):
    """A side that can also run a step of the user's own in place of its layer."""

    def reduce_by(
        self, step: Callable[..., Any] | None, values: Arrays, batch: Any, shards: Sequence[Any], dtype: str
    ) -> Reduction:
        """Runs a step of the user's own in place of the real layer; see `check_gradients`."""
