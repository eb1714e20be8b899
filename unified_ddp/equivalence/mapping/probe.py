"""Decides by running what names leave open: a square weight's layout, which of several like modules is which.

The mapping under which outputs agree in float64 is the right one: no wrong one gets there by chance. Choices are
changed one at a time, from the least error on; if none makes the outputs agree, the likeliest by name and order stays.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from unified_ddp.equivalence.mapping.find import Found
from unified_ddp.equivalence.mapping.forms import forms_of
from unified_ddp.equivalence.mapping.mapping import Mapping
from unified_ddp.equivalence.mapping.matching import Choice
from unified_ddp.equivalence.side import TensorInfo

AGREES = 1e-6
"""Relative error of outputs and loss below which a mapping is right: float64 leaves 1e-9 at most, and chance 1."""

_MOST_RUNS = 400

Error = Callable[[Mapping], float]


@dataclass
class _Search:
    found: Found
    error: Error
    leaves: dict[str, TensorInfo]
    runs: int = 0

    def of(self, choices: Sequence[Choice]) -> float:
        self.runs += 1
        return self.error(self.mapping(choices))

    def mapping(self, choices: Sequence[Choice]) -> Mapping:
        links = {self.found.prefixes[name]: sources for choice in choices for name, sources in choice.links().items()}
        kept = {name: links.get(name, sources) for name, sources in self.found.mapping.sources.items()}
        return replace(self.found.mapping, sources=kept)

    def best_first(self) -> list[Choice] | None:
        """Returns the choices under which outputs agree, tried from the least error on; None if none is in reach."""
        start = list(self.found.choices)
        ahead = [(self.of(start), 0, start)]
        seen = {_key(start)}
        while ahead and self.runs < _MOST_RUNS:
            error, _, choices = heapq.heappop(ahead)
            if error <= AGREES:
                return choices
            for option in self.neighbours(choices):
                if _key(option) not in seen and self.runs < _MOST_RUNS:
                    seen.add(_key(option))
                    heapq.heappush(ahead, (self.of(option), len(seen), option))
        best = min(ahead, default=None)
        return best[2] if best is not None and best[0] <= AGREES else None

    def neighbours(self, choices: Sequence[Choice]) -> list[list[Choice]]:
        """Returns the choices with one thing changed."""
        around = []
        for i, choice in enumerate(choices):
            for form in choice.forms[1:]:
                rest = [form, *(other for other in choice.forms if other is not form)]
                around.append(_put(choices, {i: replace(choice, forms=rest)}))
            for j in choice.rivals:
                if j > i and (swapped := self._swapped(choices, i, j)):
                    around.append(swapped)
        return around

    def _swapped(self, choices: Sequence[Choice], i: int, j: int) -> list[Choice] | None:
        a, b = choices[i], choices[j]
        forms = [self._same_keys(a, b), self._same_keys(b, a)]
        if not all(forms):
            return None
        return _put(choices, {i: replace(a, path=b.path, forms=forms[0]), j: replace(b, path=a.path, forms=forms[1])})

    def _same_keys(self, mover: Choice, there: Choice) -> list[dict]:
        """Forms of a module at another's path that make the same tensors."""
        held = {
            name.removeprefix(f"{there.path}.") if there.path else name: leaf
            for name, leaf in self.leaves.items()
            if name.startswith(there.path)
        }
        return [form for form in forms_of(mover.module, held) if form.keys() == there.forms[0].keys()]


def _key(choices: Sequence[Choice]) -> tuple[str, ...]:
    """What tells one set of choices from another: the text of every rule."""
    return tuple(
        f"{name}={','.join(source.text() for source in sources)}"
        for choice in choices
        for name, sources in sorted(choice.links().items())
    )


def _put(choices: Sequence[Choice], new: dict[int, Choice]) -> list[Choice]:
    return [new.get(i, choice) for i, choice in enumerate(choices)]


def probe(found: Found, second: Sequence[TensorInfo], error: Error) -> tuple[Mapping, str]:
    """Returns the mapping, and a note if probing could not settle what names leave open.

    Args:
        found: with its open choices.
        second: tensors of the second side.
        error: runs both sides' forward in float64 under a mapping and returns the relative error of outputs and loss.
    """
    if not found.open:
        return found.mapping, ""
    full = {name: stripped for stripped, name in found.prefixes.items()}
    search = _Search(found, error, {full[t.name]: t for t in second if t.name in full})
    settled = search.best_first()
    return (found.mapping, _unsettled(found)) if settled is None else (search.mapping(settled), "")


def _unsettled(found: Found) -> str:
    names = [name for choice in found.choices if choice.rivals or len(choice.forms) > 1 for name in choice.links()]
    return (
        f"names leave open which tensors make {', '.join(found.prefixes[n] for n in names[:4])}"
        f"{' and others' if len(names) > 4 else ''}, and under no choice do the outputs agree; they were taken in "
        "order. Add rules for them to be sure"
    )
