"""Calls that keep nothing alive, for callers that would: native code and autograd graphs."""

import weakref
from collections.abc import Callable
from typing import Any


def weak_call(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a callable that calls the bound `method` while its object lives, and then does nothing.

    Native code is invisible to the garbage collector, and autograd graphs outlive modules at times: neither may own
    what it calls. A dropped wrapper must go at once, hooks and all, on every rank alike, not when the collector comes.
    """
    ref = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        target = ref()
        return target(*args) if target is not None else None

    return call
