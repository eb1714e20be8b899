"""Notices what is done to a wrapped module after its reducer was made."""

import functools
import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks


class ModuleWatch:
    """Says whether a wrapped module still is what its reducer was made for.

    torch tells of every parameter, buffer and submodule that is assigned. What `torch.func.functional_call` puts in
    their place for a while it does not tell, and that is no change.

    Args:
        wrapper: whose `module` is the wrapped one.
        reduced: the parameters that its reducer knows.
        ignored: names of parameters that are not reduced.
        casts: the parameters' dtypes change in each iteration, by mixed precision, and tell nothing.
    """

    def __init__(
        self, wrapper: nn.Module, reduced: Collection[torch.Tensor], ignored: Collection[str], casts: bool
    ) -> None:
        _listen()
        self._wrapper = weakref.ref(wrapper)
        self.module = self._module
        """The module that the reducer was made for."""
        self._ignored = ignored
        self._named = self._parameters()
        known = set(reduced)
        self._frozen = [p for p in self._named.values() if p not in known and not p.requires_grad]
        self._cast = [] if casts else list(self._named.values())
        self._dtypes = [p.dtype for p in self._cast]
        self._device = next(iter(self._named.values())).device
        self._has_buffers = any(True for _ in self.module.buffers())
        self._assigned = False
        for part in (wrapper, *self.module.modules()):
            _watches.setdefault(part, weakref.WeakSet()).add(self)

    @property
    def _module(self) -> nn.Module:
        wrapper = self._wrapper()
        assert wrapper is not None
        return wrapper.module  # type: ignore[return-value]

    def changed(self) -> bool:
        """Says whether parameters were added, removed, replaced, cast, moved or unfrozen, or first buffers added.

        Another module in the place of the wrapped one is a change, too. Freezing is none: the reducer may go on knowing
        a parameter that gets no gradient.
        """
        if any(p.requires_grad for p in self._frozen) or [p.dtype for p in self._cast] != self._dtypes:
            return True
        if self._cast and self._cast[0].device != self._device:
            return True
        if self._assigned:
            self._assigned = self.differs()
        return self._assigned or self._module is not self.module

    def ignored_now(self) -> set[str]:
        """Returns what is ignored in the module that is wrapped now: what it says itself, and what was before."""
        if self._module is self.module:
            return set(self._ignored)
        before, now = ((*m.named_parameters(), *m.named_buffers()) for m in (self.module, self._module))
        tensors = {tensor for name, tensor in before if name in self._ignored}
        return names_to_ignore(self._module) | {name for name, tensor in now if tensor in tensors}

    @property
    def known(self) -> set[nn.Parameter]:
        """The parameters that were in the module when its reducer was made."""
        return set(self._named.values())

    def changed_inside(self) -> bool:
        """Says whether a forward has added, removed, replaced or unfrozen parameters."""
        return any(p.requires_grad for p in self._frozen) or (self._assigned and self.differs())

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


def names_to_ignore(module: nn.Module) -> set[str]:
    """Returns the names of parameters and buffers that `_set_params_and_buffers_to_ignore_for_model` put there."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


_watches: "weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[ModuleWatch]]" = weakref.WeakKeyDictionary()


@functools.cache
def _listen() -> None:
    hooks.register_module_parameter_registration_hook(_assigned)
    hooks.register_module_module_registration_hook(_assigned)
    hooks.register_module_buffer_registration_hook(functools.partial(_assigned, buffer=True))


def _assigned(module: nn.Module, name: str, value: Any, buffer: bool = False) -> None:
    for watch in _watches.get(module, ()):
        watch.assigned(buffer)
