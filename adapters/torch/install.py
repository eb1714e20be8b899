"""Puts our DistributedDataParallel in the place of torch's, for libraries that construct it themselves."""

import inspect
import sys
import threading
from types import ModuleType, TracebackType
from typing import Any

from torch.nn.parallel import DistributedDataParallel as TorchDDP

from unified_ddp.torch.ddp import DistributedDataParallel

Place = tuple[ModuleType, str]
"""A module and the name of one of its globals."""

_lock = threading.RLock()
_active: list["Installation"] = []
_rebound: list[Place] = []
_loaded_before: set[str] = set()


class Installation:
    """Ours stands in the place of torch's class until `uninstall`; also a context manager."""

    def uninstall(self) -> None:
        """Ends this installation; torch's class is back once every one has ended. Ending one again does nothing."""
        with _lock:
            if self not in _active:
                return
            _active.remove(self)
            if _active:
                return
            _rebind(DistributedDataParallel, TorchDDP, [*_rebound, *_taken_since()])
            _rebound.clear()
            if "_active_ddp_module" in vars(DistributedDataParallel):
                del DistributedDataParallel._active_ddp_module  # set on whichever class torch's module holds

    def __enter__(self) -> "Installation":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.uninstall()


def install() -> Installation:
    """Makes `torch.nn.parallel.DistributedDataParallel` ours, as every global of a loaded module that is torch's class.

    What is imported later finds ours, too. It may be called again while installed: torch's class comes back when every
    installation has ended. Objects of torch's class that exist go on as they are, but are no instances of what is
    found in its place; ours are instances of both. Subclasses of torch's class stay subclasses of it.

    Returns:
        A handle: `handle.uninstall()` undoes it, and so does leaving `with install():`.
    """
    with _lock:
        handle = Installation()
        if not _active:
            _loaded_before.clear()
            _loaded_before.update(sys.modules)
        _active.append(handle)
        places = _globals_that_are(TorchDDP)
        _rebind(TorchDDP, DistributedDataParallel, places)
        _rebound.extend(places)
        return handle


def _rebind(old: Any, new: Any, places: list[Place]) -> None:
    for module, name in places:
        if vars(module).get(name) is old:
            vars(module)[name] = new


def _taken_since() -> list[Place]:
    """Returns globals of modules loaded since which took ours for torch's: their source does not speak of us."""
    places = _globals_that_are(DistributedDataParallel)
    return [place for place in places if place[0].__name__ not in _loaded_before and not _speaks_of_us(place[0])]


def _speaks_of_us(module: ModuleType) -> bool:
    try:
        return "unified_ddp" in inspect.getsource(module)
    except (OSError, TypeError):
        return True  # no source to look at: better left alone


def _globals_that_are(cls: Any) -> list[Place]:
    """Returns the globals that hold `cls`, in modules other than our own package's."""
    found = []
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.partition(".")[0] != "unified_ddp":
            found += [(module, key) for key, value in list(vars(module).items()) if value is cls]
    return found
