"""Puts the class under test in the place of torch's, in a worker and in every process that it starts."""

import importlib
import os
import sys
from typing import Any

__all__ = ["ORIGINAL", "TORCHS", "install", "resolve"]

TORCHS = "torch.nn.parallel:DistributedDataParallel"
ORIGINAL: list[Any] = []
"""torch's own class, once `install` has run."""


def resolve(spec: str) -> Any:
    """Returns what `module:name` stands for."""
    module, _, name = spec.partition(":")
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def install() -> None:
    """Reads CONFORMANCE_IMPL, CONFORMANCE_MODE and CONFORMANCE_SETUP, and does what they say, once a process."""
    if ORIGINAL:
        return
    import torch.nn.parallel.distributed as torchs

    ORIGINAL.append(torchs.DistributedDataParallel)
    spec = os.environ.get("CONFORMANCE_IMPL", TORCHS)
    cls = resolve(spec)
    if os.environ.get("CONFORMANCE_MODE") == "adapted":
        from conformance import cpu_shim

        cpu_shim.install()
        cls = cpu_shim.without_device_ids(cls)
    if cls is not ORIGINAL[0]:
        _rebind(ORIGINAL[0], cls, but=spec.partition(":")[0].partition(".")[0])
    setup = os.environ.get("CONFORMANCE_SETUP")
    if setup:
        resolve(setup)()


def _rebind(old: Any, new: Any, but: str) -> None:
    """Rebinds every module global that is `old`, save in package `but`; later imports find `new` in torch."""
    for name, module in list(sys.modules.items()):
        package = name.partition(".")[0]
        if module is None or name == __name__ or (package == but and package != "torch"):
            continue
        namespace = getattr(module, "__dict__", {})
        for key, value in list(namespace.items()):
            if value is old:
                namespace[key] = new
