"""What a comm hook is, in the same words in all processes that have the same one: no addresses, no order of hashes."""

import dataclasses
import enum
import functools
import types
from typing import Any

from unified_ddp.hooks.protocol import SharedHook

_OWN = {"rank", "local_rank", "global_rank", "device"}
_LITERALS = (bool, int, float, complex, str, bytes, types.NoneType)
_CALLS = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)


def describe(hook: Any, state: Any = None) -> str | None:
    """Returns what kind of hook this is, and with which arguments; None for no hook.

    Of a shared hook, and of those within it, every field is told. Of a function, its full name and what it closes over;
    of a partial, what it binds; of any other object, its type and public fields. There only values are told that are
    plain: numbers, texts, None, tuples, hooks, functions and dataclasses; and none that is named rank, local_rank,
    global_rank or device, which each rank has of its own.

    Args:
        hook: a shared hook, or a framework's own: a function or another callable object.
        state: that the hook is registered with.
    """
    if hook is None:
        return None
    return _tell(hook) if state is None else f"{_tell(hook)} with {_tell(state)}"


def _tell(value: Any, within: tuple[int, ...] = ()) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, _LITERALS):
        return repr(value)
    if id(value) in within:  # a function that closes over itself
        return "..."
    within = (*within, id(value))
    if isinstance(value, list | tuple):
        return "(" + ", ".join(_tell(item, within) for item in value) + ")"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(_tell(item, within) for item in value)) + "}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_tell(key, within)}: {_tell(item, within)}" for key, item in value.items()) + "}"
    name, held = _name_and_fields(value, within)
    if not isinstance(value, SharedHook):
        held = {key: item for key, item in held.items() if key not in _OWN and _is_plain(item)}
        if not held and hasattr(value, "__qualname__"):
            return name
    return f"{name}({', '.join(f'{key}={_tell(item, within)}' for key, item in held.items())})"


def _name_and_fields(value: Any, within: tuple[int, ...]) -> tuple[str, dict[str, Any]]:
    if isinstance(value, functools.partial):
        return "partial", {"func": value.func, **{str(i): arg for i, arg in enumerate(value.args)}, **value.keywords}
    if isinstance(value, types.MethodType):
        return f"{_tell(value.__self__, within)}.{value.__name__}", {}
    if isinstance(value, types.FunctionType):
        return _full_name(value), _closed_over(value)
    if hasattr(value, "__qualname__"):  # a class, or a function that is not written in Python
        return _full_name(value), {}
    if dataclasses.is_dataclass(value):
        return type(value).__qualname__, {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    public = {key: item for key, item in getattr(value, "__dict__", {}).items() if not key.startswith("_")}
    return type(value).__qualname__, public


def _full_name(value: Any) -> str:
    module = value.__module__
    return f"{'__main__' if module == '__mp_main__' else module}.{value.__qualname__}"  # as in the process that spawned


def _closed_over(function: types.FunctionType) -> dict[str, Any]:
    held = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            held[name] = cell.cell_contents
        except ValueError:
            continue  # not assigned yet
    return held


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, (*_LITERALS, *_CALLS, enum.Enum, SharedHook)) or dataclasses.is_dataclass(value)
