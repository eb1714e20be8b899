"""The process group of wrappers that are unpickled or copied: groups themselves cannot travel."""

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group

from unified_ddp.errors import MisuseError

_group: contextvars.ContextVar[dist.ProcessGroup | None] = contextvars.ContextVar("process group", default=None)


@contextmanager
def loading(process_group: dist.ProcessGroup) -> Iterator[None]:
    """Gives wrappers that are unpickled in this context their process group.

    Needed for those that were constructed with one of their own; every rank of it loads its wrapper at the same time.
    `copy.deepcopy` needs no context: a copy has the group of its original.

    Args:
        process_group: the ranks that train together from then on.
    """
    token = _group.set(process_group)
    try:
        yield
    finally:
        _group.reset(token)


def is_default(group: dist.ProcessGroup) -> bool:
    """Says whether a group is the default one, which is there again in a process that loads."""
    try:
        return group == _get_default_group()
    except RuntimeError:
        return False


def group_to_load(had_default: bool) -> dist.ProcessGroup:
    """Returns the process group of a wrapper that is being loaded.

    Raises:
        MisuseError: it was constructed with a group of its own, and none was given.
    """
    given = _group.get()
    if given is None and not had_default:
        raise MisuseError(
            "this DistributedDataParallel was constructed with a process group of its own, not the default process "
            "group, and a group cannot be pickled. Load it inside `with "
            "unified_ddp.torch.loading(process_group=...)`, on every rank of that group"
        )
    return given if given is not None else _get_default_group()
