"""Options that `compare`, `record` and `map` share, and what they say to a pair."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from unified_ddp.equivalence.errors import EquivalenceError
from unified_ddp.equivalence.results import RUNGS

DEFAULTS: dict[str, Any] = {
    "until": "gradients",
    "ranks": 2,
    "steps": 20,
    "dtype": "float32",
    "weights": "scrambled",
    "seed": 0,
}
"""Of the settings of a check; None on the command line takes them, or what was recorded."""

_CHOICES = {
    "until": RUNGS,
    "dtype": ("float32", "float64", "bfloat16", "float16"),
    "weights": ("scrambled", "as they are"),
}

Until = Annotated[str | None, typer.Option(help=f"The last rung: {', '.join(RUNGS)}. [gradients]")]
Ranks = Annotated[int | None, typer.Option(help="Ranks of the reduction. [2]")]
Steps = Annotated[int | None, typer.Option(help="Steps of update, steps and curve. [20]")]
Dtype = Annotated[str | None, typer.Option(help="float32, float64, bfloat16 or float16. [float32]")]
Weights = Annotated[str | None, typer.Option(help="'scrambled', or 'as they are' on the first side. [scrambled]")]
Seed = Annotated[int | None, typer.Option(help="Of scrambled weights and jitter. [0]")]
MappingFile = Annotated[Path | None, typer.Option("--mapping", help="A file that `map --write` wrote.")]
Layout = Annotated[
    list[str] | None, typer.Option("--layout", help="KEY=AXES, such as 'images=NCHW -> NHWC'. May be repeated.")
]
Rename = Annotated[
    list[str] | None, typer.Option("--rename", help="PATTERN=TEXT on the first side's paths. May be repeated.")
]
Rules = Annotated[
    list[str] | None,
    typer.Option("--rule", help="NAME=RULE, such as 'fc.kernel=fc.weight | permute 1 0'. May be repeated."),
]
Tied = Annotated[list[str] | None, typer.Option("--tied", help="A tensor of the second side, tied on the first.")]
Ignore = Annotated[
    list[str] | None,
    typer.Option("--ignore", help="A tensor without counterpart, or a pattern with *. May be repeated."),
]
TorchPython = Annotated[str | None, typer.Option(help="The Python that runs torch sides. [this one]")]
JaxPython = Annotated[str | None, typer.Option(help="The Python that runs JAX sides. [this one]")]
Timeout = Annotated[float, typer.Option(help="Seconds that one answer of a side may take.")]
Reports = Annotated[
    list[Path] | None, typer.Option("--report", help="Write the report there: .json, .html or .png. May be repeated.")
]


def chosen_settings(recorded: dict[str, Any] | None, **given: Any) -> dict[str, Any]:
    """Returns what a check is given: options, else what was recorded, else the defaults.

    Raises:
        EquivalenceError: an option is none of its choices, too small, or not what was recorded.
    """
    for name, value in given.items():
        if value is None:
            continue
        if name in _CHOICES and value not in _CHOICES[name]:
            raise EquivalenceError(f"--{name} {value}: give one of {', '.join(_CHOICES[name])}")
        if name in ("ranks", "steps") and value < 1:
            raise EquivalenceError(f"--{name} {value}: give at least 1")
        if recorded is not None and recorded[name] != value:
            raise EquivalenceError(
                f"--{name} {value}: the record was made with {recorded[name]}; leave it out, or record anew"
            )
    base = DEFAULTS if recorded is None else {**DEFAULTS, **recorded}
    return {**base, **{name: value for name, value in given.items() if value is not None}}


@dataclass(frozen=True)
class PairOptions:
    """What a pair is told on the command line; see `Pair`."""

    mapping: Path | None = None
    layout: list[str] = field(default_factory=list)
    rename: list[str] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)
    tied: list[str] = field(default_factory=list)
    ignore: list[str] = field(default_factory=list)

    def for_pair(self) -> dict[str, Any]:
        """Returns the arguments of `Pair`.

        Raises:
            EquivalenceError: a text lacks its "=", or there is no such mapping.
        """
        if self.mapping is not None and not self.mapping.is_file():
            raise EquivalenceError(f"--mapping {self.mapping}: there is no such file")
        rules: dict[str, list[str]] = {}
        for name, text in (_split("--rule", r) for r in self.rules):
            rules.setdefault(name, []).append(text)
        return {
            "mapping": self.mapping,
            "layout": dict(_split("--layout", text) for text in self.layout) or None,
            "rename": [_split("--rename", text) for text in self.rename],
            "rules": rules or None,
            "tied": self.tied,
            "ignore": self.ignore,
        }


def _split(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise EquivalenceError(f"{option} {text!r}: give NAME=VALUE")
    return name.strip(), value.strip()
