"""The check before anything is broadcast: all ranks were constructed alike, or every rank says where they differ."""

import hashlib
import json
from collections.abc import Callable
from typing import Any

from unified_ddp.errors import ConstructionMismatchError
from unified_ddp.ranks.group import Gathering
from unified_ddp.ranks.texts import tell_sides


def check_construction(transport: Gathering, description: dict[str, Any], member: str = "rank") -> None:
    """Compares the ranks' descriptions: 16 bytes a rank if they agree, the whole only if they do not.

    Args:
        transport: between the ranks.
        description: what must be equal, JSON-able: lists of "parameters" and of "buffers" in order, each a dict with
            a name and further fields, and a dict of "options".
        member: what a rank is called in messages.

    Raises:
        ConstructionMismatchError: on every rank, naming the first difference and the ranks on each side.
    """
    text = json.dumps(description, sort_keys=True)
    fingerprint = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    if len(set(transport.all_gather_ints(fingerprint))) == 1:
        return
    ranks = [json.loads(t) for t in transport.all_gather_text(text)]
    raise ConstructionMismatchError(first_difference(ranks, member))


def first_difference(ranks: list[dict[str, Any]], member: str = "rank") -> str:
    """Returns the message for descriptions, by rank, that are not all equal."""
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
