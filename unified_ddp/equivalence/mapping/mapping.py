"""A mapping: for every tensor of the second side, the tensors of the first and the rules that make it."""

import tomllib
from collections.abc import Mapping as Dict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from unified_ddp.equivalence.errors import MappingError
from unified_ddp.equivalence.mapping.operations import Shift
from unified_ddp.equivalence.mapping.rules import Rule, parse_rule
from unified_ddp.equivalence.side import Arrays, TensorInfo

_IDENTITY = Rule()
MAPPING_FORMAT = "unified_ddp.mapping.1"


@dataclass(frozen=True)
class Source:
    """A tensor of the first side, and the map from it into a tensor of the second."""

    name: str
    rule: Rule = _IDENTITY
    buffer: bool = field(default=False, compare=False)

    def text(self) -> str:
        """Returns the rule as in a mapping's file."""
        return self.rule.text(self.name)


@dataclass(frozen=True)
class Mapping:
    """A tensor of the second side is the sum over its sources of rule(source).

    Attributes:
        sources: by the second side's name, parameters and buffers.
        ignored: names of either side that are left out, with the reason.
        tied: the second side's names that share tensors of the first side on purpose.
    """

    sources: dict[str, tuple[Source, ...]]
    ignored: dict[str, str]
    tied: tuple[str, ...] = ()

    def counterparts(self, name: str) -> tuple[str, ...]:
        """Returns the second side's names that a tensor of the first side is part of."""
        return tuple(second for second, sources in self.sources.items() if any(s.name == name for s in sources))

    def source_names(self) -> set[str]:
        """Returns the first side's names that are mapped."""
        return {source.name for sources in self.sources.values() for source in sources}

    def carry(self, values: Arrays, names: Sequence[str] | None = None) -> Arrays:
        """Returns the second side's tensors made of the first side's: A w."""
        return {name: self._made(name, values) for name in (self.sources if names is None else names)}

    def _made(self, name: str, values: Arrays) -> np.ndarray:
        parts = [source.rule.apply(values[source.name]) for source in self.sources[name]]
        total = parts[0]
        for part in parts[1:]:
            total = (total + part).astype(part.dtype)
        return np.ascontiguousarray(total)

    def pull_back(self, gradients: Arrays, shapes: Dict[str, tuple[int, ...]]) -> Arrays:
        """Returns the second side's gradients as gradients by the first side's tensors: A' g, summed.

        Args:
            gradients: by the second side's name; names without a rule are left out.
            shapes: of the first side's tensors.
        """
        pulled: Arrays = {}
        for name, gradient in gradients.items():
            for source in self.sources.get(name, ()):
                part = source.rule.transpose(gradient, shapes[source.name])
                before = pulled.get(source.name)
                pulled[source.name] = part if before is None else (before + part).astype(part.dtype)
        return pulled

    def invert(self, values: Arrays, shapes: Dict[str, tuple[int, ...]]) -> Arrays:
        """Returns the first side's tensors of which `carry` makes `values`; where several do, those of least norm.

        Raises:
            MappingError: none does, as where tied tensors of the second side differ.
        """
        counted = {name: np.ones(values[name].shape) for name in self.sources}
        weights = self.pull_back(counted, shapes)
        multiplicity = {
            n: sum(_linear(s.rule).apply(np.ones(shapes[s.name])) != 0 for s in made)
            for n, made in self.sources.items()
        }
        first: Arrays = {}
        copies: dict[str, np.ndarray] = {}
        for name, made in self.sources.items():
            share = values[name] / np.maximum(multiplicity[name], 1)
            for source in made:
                part = source.rule.invert(share, shapes[source.name])
                seen = source.rule.transpose(np.ones(values[name].shape), shapes[source.name]) != 0
                first[source.name] = first.get(source.name, 0) + np.where(seen, part, 0)
                copies[source.name] = copies.get(source.name, 0) + seen.astype(int)
        result = {n: (first[n] / np.maximum(copies[n], 1)).astype(_dtype_of(n, self, values)) for n in weights}
        self._require_round_trip(result, values)
        return result

    def _require_round_trip(self, first: Arrays, second: Arrays) -> None:
        for name, made in self.carry(first).items():
            want = second[name]
            scale = np.abs(want).max(initial=0.0)
            if not np.allclose(made, want, rtol=1e-5, atol=1e-6 * float(scale)):
                sources = ", ".join(f"'{s.name}'" for s in self.sources[name])
                raise MappingError(
                    f"no values of {sources} make '{name}' as it is: its rule shares them with others, which hold "
                    "different numbers. Tied tensors must be equal before they can be carried back"
                )

    def to_toml(self) -> str:
        """Returns the mapping as a file for people to review."""
        lines = [
            f"format = {_quoted(MAPPING_FORMAT)}",
            "",
            "# second side's tensor = first side's tensor | rule",
            "[rules]",
        ]
        for name, sources in self.sources.items():
            texts = [_quoted(source.text()) for source in sources]
            lines.append(f"{_quoted(name)} = {texts[0] if len(texts) == 1 else '[' + ', '.join(texts) + ']'}")
        lines += ["", "# left out, and why", "[ignored]"]
        lines += [f"{_quoted(name)} = {_quoted(reason)}" for name, reason in self.ignored.items()]
        if self.tied:
            lines += ["", "[options]", f"tied = [{', '.join(map(_quoted, self.tied))}]"]
        return "\n".join(lines) + "\n"

    def save(self, path: str | Path) -> None:
        """Writes the mapping's file (TOML)."""
        Path(path).write_text(self.to_toml())

    @staticmethod
    def load(path: str | Path) -> "Mapping":
        """Reads what `save` wrote.

        Raises:
            MappingError: it is no such file.
        """
        try:
            data = tomllib.loads(Path(path).read_text())
            if data.get("format") != MAPPING_FORMAT:
                raise MappingError(f"{path} has format {data.get('format')!r}; this version reads {MAPPING_FORMAT!r}")
            rules, ignored = data["rules"], data.get("ignored", {})
            return Mapping(
                {name: parse_sources(texts) for name, texts in rules.items()},
                {str(name): str(reason) for name, reason in ignored.items()},
                tuple(data.get("options", {}).get("tied", ())),
            )
        except (tomllib.TOMLDecodeError, KeyError, AttributeError) as error:
            raise MappingError(f"{path} is not a mapping written by Mapping.save: {error!r}") from error

    def require_fit(self, first: Sequence[TensorInfo], second: Sequence[TensorInfo]) -> None:
        """Raises MappingError unless each rule's names exist and its result has the shape of its target."""
        shapes, targets = {t.name: t.shape for t in first}, {t.name: t.shape for t in second}
        for name, sources in self.sources.items():
            if name not in targets:
                raise MappingError(
                    f"the mapping has a rule for '{name}', which the second side does not have; {_STALE}"
                )
            for source in sources:
                if source.name not in shapes:
                    raise MappingError(f"'{name}' is made of '{source.name}', which the first side lacks; {_STALE}")
                if not source.rule.fits(shapes[source.name], targets[name]):
                    raise MappingError(
                        f"'{source.text()}' makes shape {_shape_of(source, shapes)} of {shapes[source.name]}, but "
                        f"'{name}' has {targets[name]}; change its rule"
                    )


_STALE = "remove its line, or make the mapping anew"


def parse_sources(texts: str | Sequence[str]) -> tuple[Source, ...]:
    """Returns the sources of one tensor from the text, or texts, of its rules."""
    parsed = [parse_rule(text) for text in ([texts] if isinstance(texts, str) else texts)]
    return tuple(Source(name, rule) for name, rule in parsed)


def _shape_of(source: Source, shapes: Dict[str, tuple[int, ...]]) -> str:
    try:
        return str(source.rule.shape(shapes[source.name]))
    except MappingError as error:
        return f"none ({error})"


def _linear(rule: Rule) -> Rule:
    return Rule(tuple(op for op in rule.operations if not isinstance(op, Shift)))


def _dtype_of(name: str, mapping: Mapping, values: Arrays) -> np.dtype:
    return values[mapping.counterparts(name)[0]].dtype


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
