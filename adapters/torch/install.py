"""Puts our DistributedDataParallel in the place of torch's, for libraries that construct it themselves."""

import sys
import threading
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from unified_ddp.torch.ddp import DistributedDataParallel

__all__ = ["Installation", "install"]

_lock = threading.RLock()
_active: list["Installation"] = []
_rebound: list[tuple[ModuleType, str]] = []


class Installation:
    """Ours stands in the place of torch's class until `uninstall`; also a context manager."""

    def uninstall(self) -> None:
        """Ends this installation; torch's class is back once every installation has ended. Calling it again is harmless."""
        with _lock:
            if self in _active:
                _active.remove(self)
                if not _active:
                    _rebind(DistributedDataParallel, TorchDDP, _places_to_restore())
                    _rebound.clear()

    def __enter__(self) -> "Installation":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.uninstall()


def install() -> Installation:
    """Makes `torch.nn.parallel.DistributedDataParallel` ours, and so every global of a loaded module that is torch's class.

    What is imported later finds ours, too. It may be called again while installed: torch's class comes back when each
    installation has ended. Objects of torch's class that exist go on as they are. `isinstance` against torch's class
    holds for ours, but not the other way round: a library asking whether an object made before is an instance of
    what it now finds in torch is told that it is not.

    Returns:
        A handle: `handle.uninstall()` undoes it, and so does leaving `with install():`.
    """
    with _lock:
        handle = Installation()
        _active.append(handle)
        places = [place for place in _module_globals() if vars(place[0])[place[1]] is TorchDDP]
        _rebind(TorchDDP, DistributedDataParallel, places)
        _rebound.extend(places)
        return handle


def _rebind(old: Any, new: Any, places: list[tuple[ModuleType, str]]) -> None:
    for module, name in places:
        if vars(module).get(name) is old:
            vars(module)[name] = new


def _places_to_restore() -> list[tuple[ModuleType, str]]:
    """What was rebound, and the globals of modules that were loaded since, which took ours for torch's."""
    since = [(module, name) for module, name in _module_globals() if vars(module)[name] is DistributedDataParallel]
    return [*_rebound, *(place for place in since if place not in _rebound)]


def _module_globals() -> list[tuple[ModuleType, str]]:
    """Returns the modules and names of globals that are either class, in modules other than our own package's."""
    found = []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "unified_ddp" or not isinstance(module, ModuleType):
            continue
        for key, value in list(vars(module).items()):
            if value is TorchDDP or value is DistributedDataParallel:
                found.append((module, key))
    return found


def _check_torch_is_there() -> None:
    assert torch.nn.parallel.DistributedDataParallel in (TorchDDP, DistributedDataParallel)
