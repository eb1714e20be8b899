"""Notices what is done to a wrapped module after its reducer was made."""

import functools
import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks


class ModuleWatch:
    """Says whether a module still is what its reducer was made for.

    torch tells of every parameter, buffer and submodule that is assigned. What `torch.func.functional_call` puts in
    their place for a while it does not tell, and that is no change.

    Args:
        module: the wrapped module.
        reduced: the parameters that its reducer knows.
        ignored: names of parameters that are not reduced.
        casts: the parameters' dtypes change in each iteration, by mixed precision, and tell nothing.
    """

    def __init__(
        self, module: nn.Module, reduced: Collection[torch.Tensor], ignored: Collection[str], casts: bool
    ) -> None:
        _listen()
        self._module = module
        self._ignored = ignored
        self._named = self._parameters()
        known = set(reduced)
        self._frozen = [p for p in self._named.values() if p not in known]
        self._cast = [] if casts else list(self._named.values())
        self._dtypes = [p.dtype for p in self._cast]
        self._device = next(iter(self._named.values())).device
        self._has_buffers = any(True for _ in module.buffers())
        self._assigned = False
        for part in module.modules():
            _watches.setdefault(part, weakref.WeakSet()).add(self)

    def changed(self) -> bool:
        """Says whether parameters were added, removed, replaced, cast, moved or unfrozen, or first buffers added.

        Freezing is no change: the reducer may go on knowing a parameter that gets no gradient.
        """
        if any(p.requires_grad for p in self._frozen) or [p.dtype for p in self._cast] != self._dtypes:
            return True
        if self._cast and self._cast[0].device != self._device:
            return True
        if self._assigned:
            self._assigned = self.differs()
        return self._assigned

    def differs(self) -> bool:
        """Says, at the cost of a walk over the module, whether other parameters are in it, or first buffers."""
        now = self._parameters()
        buffers = not self._has_buffers and any(True for _ in self._module.buffers())
        return buffers or now.keys() != self._named.keys() or any(now[n] is not p for n, p in self._named.items())

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self._module.named_parameters() if n not in self._ignored}

    def assigned(self, buffer: bool) -> None:
        """Hears that a part of the module was assigned a parameter or submodule, or a buffer."""
        if not (buffer and self._has_buffers):
            self._assigned = True


_watches: "weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[ModuleWatch]]" = weakref.WeakKeyDictionary()


@functools.cache
def _listen() -> None:
    hooks.register_module_parameter_registration_hook(_assigned)
    hooks.register_module_module_registration_hook(_assigned)
    hooks.register_module_buffer_registration_hook(functools.partial(_assigned, buffer=True))


def _assigned(module: nn.Module, name: str, value: Any, buffer: bool = False) -> None:
    for watch in _watches.get(module, ()):
        watch.assigned(buffer)
