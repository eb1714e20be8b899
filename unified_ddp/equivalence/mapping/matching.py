"""Which module of the first side is at which path of the second: by form first, then by names, then by order."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from unified_ddp.equivalence.mapping import recurrent as _recurrent  # noqa: F401  (registers its forms)
from unified_ddp.equivalence.mapping.forms import Form, Module, forms_of
from unified_ddp.equivalence.mapping.mapping import Source
from unified_ddp.equivalence.mapping.modules import variants_of
from unified_ddp.equivalence.mapping.names import Name, names_of, similarity
from unified_ddp.equivalence.side import TensorInfo

_DEPTH = 2
"""Keys of forms have up to two parts, as "query.kernel"."""
_ORDER_WEIGHT = 1e-3
_SAME = 1e-9


@dataclass
class Choice:
    """A module at a path, in one of the forms that fit there.

    Attributes:
        module: of the first side.
        path: of the second side.
        forms: those that fit; the first is taken unless probing says otherwise.
        rivals: indices of choices with which this one could change places for all that names say.
    """

    module: Module
    path: str
    forms: list[Form]
    rivals: list[int]

    def links(self, form: int = 0) -> dict[str, tuple[Source, ...]]:
        """Returns sources by the second side's full names (without what `strip` took off)."""
        return {_join(self.path, key): sources for key, sources in self.forms[form].items()}


def match(modules: Sequence[Module], leaves: dict[str, TensorInfo]) -> list[Choice]:
    """Returns one choice for each module that has a place, best names first.

    Args:
        modules: of the first side, in order of definition.
        leaves: tensors of the second side by name, in order of definition.
    """
    below = _below(leaves)
    units = [unit for module in modules for unit in _best_variant(module, below)]
    paths = list(below)
    fitting = {
        (i, path): forms for i, unit in enumerate(units) for path in paths if (forms := forms_of(unit, below[path]))
    }
    scores = _scores(units, paths, below, fitting)
    order = _ranks(units, paths, fitting)
    taken: list[Choice] = []
    keys: list[tuple[int, str]] = []
    used: set[str] = set()
    done: set[int] = set()
    for i, path in sorted(fitting, key=lambda pair: (-scores[pair] - _ORDER_WEIGHT * order[pair], pair[0])):
        forms = [form for form in fitting[i, path] if not used & {_join(path, key) for key in form}]
        if i in done or not forms:
            continue
        forms = _fullest(forms)
        taken.append(Choice(units[i], path, forms, []))
        keys.append((i, path))
        used |= {_join(path, key) for key in forms[0]}
        done.add(i)
    _find_rivals(taken, keys, fitting, scores)
    return taken


def _fullest(forms: list[Form]) -> list[Form]:
    most = max(len(form) for form in forms)
    return [form for form in forms if len(form) == most]


def _below(leaves: dict[str, TensorInfo]) -> dict[str, dict[str, TensorInfo]]:
    """For every path that has tensors no deeper than a form looks: those by key."""
    found: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    for name, leaf in leaves.items():
        parts = name.split(".")
        for depth in range(1, min(_DEPTH, len(parts)) + 1):
            found[".".join(parts[:-depth])][".".join(parts[-depth:])] = leaf
    return dict(found)


def _best_variant(module: Module, below: dict[str, dict[str, TensorInfo]]) -> list[Module]:
    """Takes the first variant all of whose parts have a place, or the module as it is."""
    variants = variants_of(module)
    if len(variants) == 1:
        return variants[0]
    for parts in variants:
        if all(any(forms_of(part, held) for held in below.values()) for part in parts):
            return parts
    return variants[0]


def _kind_of(held: dict[str, TensorInfo]) -> str:
    return " ".join(sorted(f"{key}/{len(leaf.shape)}" for key, leaf in held.items() if "." not in key))


def _scores(
    units: Sequence[Module],
    paths: Sequence[str],
    below: dict[str, dict[str, TensorInfo]],
    fitting: dict[tuple[int, str], list[Form]],
) -> dict[tuple[int, str], float]:
    ours = names_of([unit.path for unit in units], [unit.type for unit in units])
    theirs: dict[str, Name] = dict(zip(paths, names_of(paths, [_kind_of(below[path]) for path in paths]), strict=True))
    return {(i, path): similarity(ours[i], theirs[path]) for i, path in fitting}


def _ranks(
    units: Sequence[Module], paths: Sequence[str], fitting: dict[tuple[int, str], list[Form]]
) -> dict[tuple[int, str], float]:
    """How near a unit's rank among its type is to the path's among those that fit the type; 0 is the same."""
    by_type: dict[str, list[int]] = defaultdict(list)
    for i, unit in enumerate(units):
        by_type[unit.type].append(i)
    ranks = {}
    for members in by_type.values():
        places = [path for path in paths if any((i, path) in fitting for i in members)]
        for rank, i in enumerate(members):
            for place, path in enumerate(places):
                if (i, path) in fitting:
                    ranks[i, path] = -abs(rank - place) / max(len(members), len(places))
    return ranks


def _find_rivals(
    taken: list[Choice],
    keys: list[tuple[int, str]],
    fitting: dict[tuple[int, str], list[Form]],
    scores: dict[tuple[int, str], float],
) -> None:
    """Two choices are rivals if names say nothing against changing their places."""
    by_type: dict[str, list[int]] = defaultdict(list)
    for index, choice in enumerate(taken):
        by_type[choice.module.type].append(index)
    for members in by_type.values():
        for position, a in enumerate(members):
            for b in members[position + 1 :]:
                (i, p), (j, q) = keys[a], keys[b]
                if (i, q) not in fitting or (j, p) not in fitting:
                    continue
                if scores[i, q] + scores[j, p] >= scores[i, p] + scores[j, q] - _SAME:
                    taken[a].rivals.append(b)
                    taken[b].rivals.append(a)


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
