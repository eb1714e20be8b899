"""The table: one row a scenario, what plain autograd makes of it, and what a DDP class must.

A row's case runs on every rank as `case(ddp_class, rank, world_size)`. It returns if all was right, fails an assertion
if something was silently wrong, or raises what the class raises. A row that expects errors says by rank which words
they must hold; a rank that is not named may do anything.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ROWS", "Row", "row"]

Case = Callable[[type, int, int], None]


@dataclass(frozen=True)
class Row:
    name: str
    kind: str
    plain: str
    case: Case
    ranks: int
    timeout: float
    errors: Mapping[int, Sequence[str]] = field(default_factory=dict)
    kills: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def expected(self) -> str:
        return "a named error" if self.errors else "as plain autograd"


ROWS: dict[str, Row] = {}


def row(
    name: str,
    plain: str,
    *,
    ranks: int = 2,
    timeout: float = 40.0,
    errors: Mapping[int, Sequence[str]] | None = None,
    kills: bool = False,
    variants: Sequence[Mapping[str, Any]] = ({},),
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Enters a case in the table, once for each variant: keyword arguments of the case.

    Args:
        name: what is done, in a few words.
        plain: what plain autograd makes of it, or what a user can expect.
        ranks: how many processes it takes.
        timeout: seconds after which it counts as a hang.
        errors: by rank, what its error must say; None if all must be right.
        kills: it ends ranks.
        variants: keyword arguments.
    """

    def enter(case: Callable[..., None]) -> Callable[..., None]:
        kind = case.__module__.rsplit(".", 1)[-1].replace("_", " ")
        for variant in variants:
            full = name + "".join(f", {k}={v}" for k, v in variant.items())
            assert full not in ROWS, full
            ROWS[full] = Row(full, kind, plain, case, ranks, timeout, errors or {}, kills, variant)
        return case

    return enter


def load() -> dict[str, Row]:
    """Returns all rows, by name."""
    from faults import scenarios

    for module in pkgutil.iter_modules(scenarios.__path__):
        importlib.import_module(f"faults.scenarios.{module.name}")
    return ROWS
