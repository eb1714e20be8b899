"""The check before anything is broadcast: all ranks were constructed alike, or every rank says where they differ."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unified_ddp.errors import ConstructionMismatchError
from unified_ddp.plan import ParamSpec, itemsize_of, schema_fingerprint
from unified_ddp.ranks.group import Gathering
from unified_ddp.ranks.texts import tell_sides


def any_spec(
    name: str, shape: Sequence[int], dtype: str, *, strides: Sequence[int] = (), trainable: bool = True
) -> ParamSpec:
    """Returns the spec of any tensor for this check: a dtype that the core does not know goes into the name."""
    if not itemsize_of(dtype):
        name, dtype = f"{name} ({dtype})", "uint8"
    return ParamSpec(name, shape, dtype, strides=strides, trainable=trainable)


def check_construction(
    gathering: Gathering,
    parameters: Sequence[ParamSpec],
    buffers: Sequence[ParamSpec],
    options: Mapping[str, Any],
    member: str = "rank",
) -> None:
    """Compares what ranks were constructed with: 8 bytes a rank if they agree, names and all only if they do not.

    Args:
        gathering: between the ranks.
        parameters: in order; devices and sparsity may differ, and strides of dimensions with one element.
        buffers: in order.
        options: what else must be equal, JSON-able.
        member: what a rank is called in messages.

    Raises:
        ConstructionMismatchError: on every rank, naming the first difference and the ranks on each side.
    """
    order = [[spec.name, _strides(spec)] for spec in (*parameters, *buffers)]
    seen = [schema_fingerprint(parameters), schema_fingerprint(buffers), order, dict(options)]
    digest = hashlib.blake2b(json.dumps(seen, sort_keys=True).encode(), digest_size=8).digest()
    if len(set(gathering.all_gather_ints(int.from_bytes(digest, "little")))) == 1:
        return
    told = {"parameters": list(map(_told, parameters)), "buffers": list(map(_told, buffers)), "options": dict(options)}
    ranks = [json.loads(text) for text in gathering.all_gather_text(json.dumps(told))]
    raise ConstructionMismatchError(_first_difference(ranks, member))


def _strides(spec: ParamSpec) -> list[int]:
    """Strides where they matter: along dimensions of more than one element."""
    return [stride for stride, extent in zip(spec.strides, spec.shape, strict=True) if extent > 1]


def _told(spec: ParamSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "shape": list(spec.shape),
        "dtype": spec.dtype,
        "strides": _strides(spec),
        "trainable": spec.trainable,
    }


def _first_difference(ranks: list[dict[str, Any]], member: str) -> str:
    """Returns the message for what was told, by rank, and is not all equal."""
    many = f"{member}{'es' if member.endswith('s') else 's'}"
    for kind in ("parameters", "buffers"):
        found = _difference_in_tensors(kind, [r[kind] for r in ranks], member, many)
        if found:
            return found
    for name in sorted({name for r in ranks for name in r["options"]}):
        sides = tell_sides([repr(r["options"].get(name)) for r in ranks], member)
        if sides:
            return (
                f"{many} were constructed with different options: {name} is {sides}. Pass the same on every {member}."
            )
    raise AssertionError("the descriptions are equal")


def _difference_in_tensors(kind: str, ranks: list[list[dict[str, Any]]], member: str, many: str) -> str | None:
    one = kind.removesuffix("s")
    remedy = f"Build the same model on every {member}; nothing was broadcast."

    def sides(values: list[Any], show: Callable[[Any], str]) -> str:
        return tell_sides([show(value) for value in values], member)

    for position in range(max(map(len, ranks))):
        here = [r[position] if position < len(r) else None for r in ranks]
        if found := sides(here, lambda t: "absent" if t is None else f"{t['name']!r}"):
            counts = sides(ranks, lambda r: f"{len(r)} {kind}")
            count = f" The {many} have {counts}." if counts else ""
            return f"{many} hold different {kind}: {one} number {position} is {found}.{count} {remedy}"
        first = next(t for t in here if t is not None)
        for field in (f for f in first if f != "name"):
            if found := sides(here, lambda t, field=field: f"{t[field]}"):  # type: ignore[misc]
                return f"{many} hold different {kind}: the {field} of {one} {first['name']!r} is {found}. {remedy}"
    return None
