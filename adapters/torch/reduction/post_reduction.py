"""Hooks on parameters whose reduced gradient is final: to step, clip or log bucket by bucket."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

PostReductionHook = Callable[[str, nn.Parameter], None]


@dataclass
class PostReductionHooks:
    """The hooks of one wrapped module, in the order of their registration.

    An exception in a hook must not leave gradients half reduced, nor other ranks waiting: the first one is kept, no
    hook is called any more in this backward pass, and `raise_first` raises it when everything is reduced.
    """

    hooks: "OrderedDict[int, tuple[PostReductionHook, frozenset[str] | None]]" = field(default_factory=OrderedDict)
    _error: BaseException | None = None

    def register(self, hook: PostReductionHook, names: Collection[str] | None) -> RemovableHandle:
        """Adds a hook on the parameters of these names; None means all."""
        handle = RemovableHandle(self.hooks)
        self.hooks[handle.id] = (hook, frozenset(names) if names is not None else None)
        return handle

    def rename(self, names: Mapping[str, str]) -> None:
        """Hears of the new names of parameters that lie elsewhere in the module now."""
        for key, (hook, wanted) in self.hooks.items():
            if wanted is not None:
                self.hooks[key] = hook, frozenset(names.get(name, name) for name in wanted)

    def run(self, names: Sequence[str], params: Sequence[nn.Parameter], reduced: Iterable[int]) -> None:
        """Calls the hooks on the parameters of these indices, whose gradients are reduced now."""
        if not self.hooks or self._error is not None:
            return
        try:
            with torch.no_grad():
                for index in reduced:
                    for hook, wanted in list(self.hooks.values()):
                        if wanted is None or names[index] in wanted:
                            hook(names[index], params[index])
        except BaseException as error:
            self._error = error

    def raise_first(self) -> None:
        """Raises the first exception since the last call, if there was one."""
        error, self._error = self._error, None
        if error is not None:
            raise error
