"""The JSON schema of a report, made of the dataclasses it consists of, their types and their docstrings.

`python -m unified_ddp.equivalence.report.schema` prints what is published as docs/equivalence-report.schema.json.
"""

import inspect
import json
import re
import typing
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any

from unified_ddp.equivalence.report.serial import union_members
from unified_ddp.equivalence.results import REPORT_FORMAT, Results

_NON_FINITE = {"enum": ["inf", "-inf", "nan"]}
_SCALARS: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    bool: {"type": "boolean"},
    float: {"anyOf": [{"type": "number"}, _NON_FINITE]},
    type(None): {"type": "null"},
}


def report_schema() -> dict[str, Any]:
    """Returns the schema (JSON Schema 2020-12). Keys may be added under one format; none changes its meaning."""
    definitions: dict[str, Any] = {}
    root = _of_dataclass(Results, definitions)
    derived = {
        "format": {"const": REPORT_FORMAT, "description": "changes whenever a key changes its meaning"},
        "ok": {"type": "boolean", "description": "every rung was run and agrees"},
        "first_failure": {"type": ["string", "null"], "description": "the first rung that does not agree"},
    }
    rung = definitions["Rung"]
    rung["properties"]["verdict"] = {"$ref": "#/$defs/Verdict", "description": "worst of the findings"}
    rung["properties"]["worst"] = {"type": ["string", "null"], "description": "name of the worst finding"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Equivalence report of unified_ddp",
        **root,
        "properties": {**derived, **root["properties"]},
        "required": [*derived, *root["required"]],
        "$defs": dict(sorted(definitions.items())),
    }


def _of(wanted: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    members = union_members(wanted)
    if len(members) > 1:
        return {"anyOf": [_of(member, definitions) for member in members]}
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is tuple and arguments[-1] is Ellipsis:
        return {"type": "array", "items": _of(arguments[0], definitions)}
    if origin is tuple:
        items = [_of(argument, definitions) for argument in arguments]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _of(arguments[1], definitions)}
    if wanted in _SCALARS:
        return dict(_SCALARS[wanted])
    if wanted.__name__ not in definitions:
        definitions[wanted.__name__] = {}  # seen
        known = _of_dataclass(wanted, definitions) if is_dataclass(wanted) else _of_enum(wanted)
        definitions[wanted.__name__] = known
    return {"$ref": f"#/$defs/{wanted.__name__}"}


def _of_enum(wanted: type[Enum]) -> dict[str, Any]:
    return {"description": _summary(wanted), "enum": [member.value for member in wanted]}


def _of_dataclass(wanted: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    hints, told = typing.get_type_hints(wanted), _attributes(wanted)
    properties = {}
    for field in fields(wanted):
        properties[field.name] = _of(hints[field.name], definitions)
        if field.name in told:
            properties[field.name]["description"] = told[field.name]
    required = [f.name for f in fields(wanted) if f.default is MISSING and f.default_factory is MISSING]
    return {"description": _summary(wanted), "type": "object", "properties": properties, "required": required}


def _summary(wanted: Any) -> str:
    return (inspect.getdoc(wanted) or "").split("\n\n")[0]


def _attributes(wanted: Any) -> dict[str, str]:
    """Returns the texts of a docstring's section of attributes."""
    section = (inspect.getdoc(wanted) or "").partition("Attributes:\n")[2]
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text) for name, text in found}


if __name__ == "__main__":
    print(json.dumps(report_schema(), indent=2))
