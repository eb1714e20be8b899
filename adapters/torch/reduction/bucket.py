"""What a comm hook is given: the interface of torch.distributed.GradBucket over our own storage.

torch's class cannot be constructed from Python; hooks written for it run on this one unchanged.
"""

from collections.abc import Sequence

import torch

from unified_ddp.torch.reduction.sparse import SparseBucketStorage
from unified_ddp.torch.reduction.storage import BucketStorage, gradient_views


class GradBucket:
    """One bucket as a comm hook sees it: this rank's gradients, not divided by the world size.

    Args:
        index: of the bucket, in launch order.
        last: whether it is the last bucket of this backward pass.
        storage: its gradients.
        names: of its parameters.
    """

    def __init__(
        self, index: int, last: bool, storage: BucketStorage | SparseBucketStorage, names: Sequence[str] = ()
    ) -> None:
        self._index = index
        self._names = tuple(names)
        self._last = last
        self._storage = storage
        self._buffer = storage.flat

    def index(self) -> int:
        """Returns the bucket's index, 0 for the first one launched."""
        return self._index

    def is_last(self) -> bool:
        """Says whether this is the last bucket launched in a backward pass."""
        return self._last

    def buffer(self) -> torch.Tensor:
        """Returns the flat gradients, shape (number of elements,); the sparse gradient for a sparse parameter."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """Returns one view of the buffer a parameter, shaped as the parameter, in `parameters()`' order."""
        if self._buffer is self._storage.flat or self._storage.spec.sparse:
            return list(self._storage.views)
        return gradient_views(self._buffer, self._storage.spec, self._storage.params)

    def parameters(self) -> list[torch.Tensor]:
        """Returns the parameters of the bucket."""
        return list(self._storage.params)

    def names(self) -> tuple[str, ...]:
        """Returns the names of the parameters; torch's class does not have them."""
        return self._names

    @property
    def is_sparse(self) -> bool:
        """Whether it is one parameter whose gradient is sparse; torch's class does not have this."""
        return self._storage.spec.sparse

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replaces the buffer."""
        self._buffer = buffer
