"""A report as JSON and back. The format is that of the dataclasses in `results`, see `schema`."""

import json
import math
import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar

from unified_ddp.equivalence.errors import EquivalenceError
from unified_ddp.equivalence.results import REPORT_FORMAT, Results

Kind = TypeVar("Kind", bound=Results)


def report_to_json(report: Results) -> str:
    """Returns strict JSON: infinite values and NaN are strings."""
    return json.dumps(report.to_dict(), indent=1, allow_nan=False)


def report_from_json(text: str, kind: type[Kind]) -> Kind:
    """Returns the report as one of `kind`. Keys that are derived from others are not read; unknown ones are ignored.

    Raises:
        EquivalenceError: it is not JSON, of another format, or a value is missing or of another type.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise EquivalenceError(f"not a report: no JSON ({error})") from error
    found = data.get("format") if isinstance(data, dict) else None
    if found != REPORT_FORMAT:
        raise EquivalenceError(f"not a report that this version reads: its format is {found!r}, not {REPORT_FORMAT!r}")
    return _read(kind, data, "report")


def union_members(wanted: Any) -> tuple[Any, ...]:
    """Returns the members of a union type, of any other type itself."""
    return typing.get_args(wanted) if isinstance(wanted, types.UnionType) else (wanted,)


def _read(wanted: Any, value: Any, where: str) -> Any:
    members = union_members(wanted)
    if type(None) in members:
        if value is None:
            return None
        (wanted,) = (member for member in members if member is not type(None))
    if is_dataclass(wanted):
        return _read_dataclass(wanted, value, where)
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is tuple:
        return _read_tuple(arguments, value, where)
    if origin is dict:
        _require(isinstance(value, dict), wanted, value, where)
        return {key: _read(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    return _read_scalar(wanted, value, where)


def _read_dataclass(wanted: Any, value: Any, where: str) -> Any:
    _require(isinstance(value, dict), wanted, value, where)
    hints = typing.get_type_hints(wanted)
    found = {}
    for field in fields(wanted):
        if field.name in value:
            found[field.name] = _read(hints[field.name], value[field.name], f"{where}.{field.name}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise EquivalenceError(f"not a report: {where}.{field.name} is missing")
    return wanted(**found)


def _read_tuple(arguments: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    _require(isinstance(value, list), tuple, value, where)
    if arguments[-1] is Ellipsis:
        return tuple(_read(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    _require(len(value) == len(arguments), f"{len(arguments)} items", value, where)
    return tuple(_read(arguments[i], item, f"{where}[{i}]") for i, item in enumerate(value))


def _read_scalar(wanted: Any, value: Any, where: str) -> Any:
    if wanted is float:
        if isinstance(value, str) and value in ("inf", "-inf", "nan"):
            return math.inf if value == "inf" else float(value)
        _require(isinstance(value, int | float) and not isinstance(value, bool), wanted, value, where)
        return float(value)
    if issubclass(wanted, Enum):
        _require(value in list(wanted), wanted, value, where)
        return wanted(value)
    _require(isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool)), wanted, value, where)
    return value


def _require(holds: bool, wanted: Any, value: Any, where: str) -> None:
    if not holds:
        name = getattr(wanted, "__name__", wanted)
        raise EquivalenceError(f"not a report: {where} is {str(value)[:60]!r}, not {name}")
