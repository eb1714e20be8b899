"""Finds a mapping: what the user said, then what matching finds; what is left is an error that says what to add."""

import fnmatch
import re
from collections.abc import Mapping as Dict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from unified_ddp.equivalence.errors import MappingError
from unified_ddp.equivalence.mapping.mapping import Mapping, Source, parse_sources
from unified_ddp.equivalence.mapping.matching import Choice, match
from unified_ddp.equivalence.mapping.modules import modules_of
from unified_ddp.equivalence.side import TensorInfo

_COLLECTIONS = ("params.", "batch_stats.", "buffers.")
"""Names of flax's collections, which may stand before the paths that parameters and their buffers share."""


@dataclass(frozen=True)
class Overrides:
    """What a user says of the mapping; see `Pair`."""

    rename: tuple[tuple[str, str], ...] = ()
    rules: Dict[str, str | Sequence[str]] | None = None
    tied: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()

    def ignores(self, name: str) -> bool:
        """Says whether a name is to be left out."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.ignore)

    def renamed(self, path: str) -> str:
        """Returns the path of the first side as it is compared with those of the second."""
        for pattern, replacement in self.rename:
            path = re.sub(pattern, replacement, path)
        return path


@dataclass(frozen=True)
class Found:
    """A mapping, and the choices that names left open, which probing may change.

    Attributes:
        mapping: with the likeliest choices.
        choices: all of them.
        prefixes: by stripped name of the second side, the full one.
    """

    mapping: Mapping
    choices: tuple[Choice, ...]
    prefixes: dict[str, str]

    @property
    def open(self) -> bool:
        """Says whether names left anything open."""
        return any(choice.rivals or len(choice.forms) > 1 for choice in self.choices)


def find_mapping(
    first: Sequence[TensorInfo], second: Sequence[TensorInfo], overrides: Overrides, *, typed: bool
) -> Found:
    """Returns a mapping by which every parameter of both sides has a counterpart.

    Args:
        first: tensors of the first side.
        second: of the second side.
        overrides: what the user said.
        typed: the first side's module types say how their tensors lie on the second side (torch against JAX).

    Raises:
        MappingError: a tensor has no counterpart, or a rule does not fit.
    """
    rules = {name: parse_sources(texts) for name, texts in (overrides.rules or {}).items()}
    _require_names(overrides, rules, first, second)
    fixed = {source.name for sources in rules.values() for source in sources}
    stripped = {_stripped(t.name): t.name for t in second}
    free_first = [_renamed(t, overrides) for t in first if t.name not in fixed and not overrides.ignores(t.name)]
    free_second = {_stripped(t.name): t for t in second if t.name not in rules and not overrides.ignores(t.name)}
    choices = match(modules_of(free_first, typed=typed), free_second)
    links = {stripped[name]: sources for choice in choices for name, sources in choice.links().items()}
    _require_meant_ties(links, first, overrides)
    links |= rules
    ordered = {t.name: links[t.name] for t in second if t.name in links}
    mapping = Mapping(ordered, _left_out(ordered, first, second, overrides), overrides.tied)
    _require_all(mapping, first, second)
    mapping.require_fit(first, second)
    return Found(mapping, tuple(choices), stripped)


def _stripped(name: str) -> str:
    for collection in _COLLECTIONS:
        name = name.removeprefix(collection)
    return name


def _renamed(tensor: TensorInfo, overrides: Overrides) -> TensorInfo:
    aliases = tuple(replace(alias, owner=overrides.renamed(alias.owner)) for alias in tensor.aliases)
    return replace(tensor, owner=overrides.renamed(tensor.owner), aliases=aliases)


def _require_names(
    overrides: Overrides,
    rules: Dict[str, tuple[Source, ...]],
    first: Sequence[TensorInfo],
    second: Sequence[TensorInfo],
) -> None:
    known = {t.name for t in second}
    for what, names in (("rules", rules), ("tied", overrides.tied)):
        for name in names:
            if name not in known:
                raise MappingError(f"{what} has '{name}', which the second side does not have; {_nearest(name, known)}")
    every = known | {t.name for t in first}
    for pattern in overrides.ignore:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in every):
            raise MappingError(f"ignore has '{pattern}', which no tensor is called; {_nearest(pattern, every)}")


def _nearest(name: str, known: set[str]) -> str:
    import difflib

    near = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.3)
    return f"it has {', '.join(repr(n) for n in near)}" if near else f"it has {sorted(known)[:5]}"


def _require_meant_ties(
    links: Dict[str, tuple[Source, ...]], first: Sequence[TensorInfo], overrides: Overrides
) -> None:
    for tensor in first:
        holders = [name for name, sources in links.items() if any(s.name == tensor.name for s in sources)]
        if tensor.aliases and len(holders) > 1 and not set(holders[1:]) <= set(overrides.tied):
            both = " and ".join(f"'{n}'" for n in (tensor.name, *(alias.name for alias in tensor.aliases)))
            raise MappingError(
                f"{both} are one tensor on the first side, but the second side holds {_list(holders)} apart: each gets "
                f"a part of the gradient, and after one update they differ. Tie them there, or, if it is meant, say "
                f"tied={holders[1:]!r}"
            )


def _left_out(
    links: Dict[str, tuple[Source, ...]],
    first: Sequence[TensorInfo],
    second: Sequence[TensorInfo],
    overrides: Overrides,
) -> dict[str, str]:
    used = {source.name for sources in links.values() for source in sources}
    reasons = {}
    for side, tensors, mapped in (("first", first, used), ("second", second, set(links))):
        for tensor in tensors:
            if tensor.name in mapped:
                continue
            if overrides.ignores(tensor.name):
                reasons[tensor.name] = "ignore= says so"
            elif tensor.buffer:
                reasons[tensor.name] = f"a buffer of the {side} side without counterpart"
    return reasons


def _require_all(mapping: Mapping, first: Sequence[TensorInfo], second: Sequence[TensorInfo]) -> None:
    used = mapping.source_names()
    ours = [t for t in first if t.name not in used and t.name not in mapping.ignored]
    theirs = [t for t in second if t.name not in mapping.sources and t.name not in mapping.ignored]
    if not ours and not theirs:
        return
    lines = [_tell_second(t, ours, mapping, first) for t in theirs] + [_tell_first(t, theirs, mapping) for t in ours]
    head = f"{len(lines)} tensors have no counterpart:\n" if len(lines) > 1 else ""
    raise MappingError(head + "\n".join(lines[:_TOLD]) + (f"\nand {len(lines) - _TOLD} more" * (len(lines) > _TOLD)))


_TOLD = 12


def _tell_second(leaf: TensorInfo, ours: Sequence[TensorInfo], mapping: Mapping, first: Sequence[TensorInfo]) -> str:
    beside = _owner_beside(leaf, mapping, first)
    if leaf.key in ("bias", "b", "beta", "offset") and beside is not None and not ours:
        return (
            f"'{leaf.name}' {leaf.shape} has no counterpart: '{beside.owner}' is {_type(beside)} without a bias. "
            f"Say ignore=['{leaf.name}'] if it stays zero, or build it with use_bias=False"
        )
    size = _elements(leaf)
    alike = [t for t in ours if _elements(t) == size]
    if len(alike) > 1:
        hint = f"{_list([t.name for t in alike])} fit alike; add to rules the one that makes it, with how it lies: "
        return f"'{leaf.name}' {leaf.shape}: {hint}rules={{'{leaf.name}': '{alike[0].name} | permute 1 0'}}"
    if alike:
        return (
            f"'{leaf.name}' {leaf.shape} has no counterpart by name and type; '{alike[0].name}' {alike[0].shape} has "
            f"as many elements. Say how it lies: rules={{'{leaf.name}': '{alike[0].name} | reshape "
            f"{' '.join(map(str, leaf.shape))}'}} (or permute, take, place, stack ...)"
        )
    return (
        f"'{leaf.name}' {leaf.shape} has no counterpart on the first side. Say of what it is made: "
        f"rules={{'{leaf.name}': '... | ...'}}, or ignore=['{leaf.name}'] to leave it as it is"
    )


def _tell_first(tensor: TensorInfo, theirs: Sequence[TensorInfo], mapping: Mapping) -> str:
    fitting = [t.name for t in theirs if _elements(t) == _elements(tensor)]
    owner = f" of '{tensor.owner}' ({_type(tensor)})" if tensor.owner else ""
    if fitting:
        return (
            f"'{tensor.name}' {tensor.shape}{owner} makes no tensor yet; {_list(fitting)} may be made of it, see rules"
        )
    return (
        f"'{tensor.name}' {tensor.shape}{owner} has no counterpart on the second side. Add it there, name it in rules, "
        f"or say ignore=['{tensor.name}']"
    )


def _owner_beside(leaf: TensorInfo, mapping: Mapping, first: Sequence[TensorInfo]) -> TensorInfo | None:
    path = leaf.name.rpartition(".")[0]
    for name, sources in mapping.sources.items():
        if name.rpartition(".")[0] == path:
            return next((t for t in first if t.name == sources[0].name), None)
    return None


def _type(tensor: TensorInfo) -> str:
    return tensor.owner_type.rpartition(".")[2] or "a module"


def _elements(tensor: TensorInfo) -> int:
    size = 1
    for n in tensor.shape:
        size *= n
    return size


def _list(names: Sequence[str]) -> str:
    quoted = [f"'{name}'" for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}"
