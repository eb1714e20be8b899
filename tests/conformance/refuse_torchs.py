"""Makes torch's own reducer and constructor raise, so that nothing can pass by way of them."""

from typing import Any, NoReturn

import torch
import torch.distributed as dist

from conformance import substitution

__all__ = ["install"]


def _refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise AssertionError("torch's own Reducer or DistributedDataParallel constructor was reached")


def install() -> None:
    """Runs in every process, after the substitution."""
    substitution.ORIGINAL[0].__init__ = _refuse
    dist.Reducer = _refuse  # type: ignore[assignment,misc]
    torch._C._distributed_c10d.Reducer = _refuse  # type: ignore[assignment,misc]
