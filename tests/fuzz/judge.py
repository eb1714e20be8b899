"""What must come of a program, computed from what plain autograd left on each rank; and whether it did."""

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from support.world import World

from fuzz.programs import Program
from fuzz.run import run_program

_numbers = itertools.count()
LEAVES_NOTHING_IN_FLIGHT = ("OutOfStepError", "UnusedParameterError", "ConstructionMismatchError", "MisuseError")
# Of the largest term: what is rounded are the terms of each rank, which may cancel.
LOSSY = {"torch_fp16": 2e-3, "Compressed": 2e-2}


def judge(program: Program, world: World) -> str | None:
    """Runs a program and returns what is wrong, or None. The world is ended if its ranks may be of no more use."""
    timeout = 3 * program["timeout"] + 25
    results = world.collect(run_program, timeout=timeout, program=program, number=next(_numbers))
    bad = [f"rank {rank}: {r.error}" for rank, r in enumerate(results) if r.error]
    if bad:
        return "a rank hangs or died: " + "; ".join(bad)
    traces = [r.value for r in results]
    if any(trace["error"] and trace["error"]["type"] not in LEAVES_NOTHING_IN_FLIGHT for trace in traces):
        world.stop()
    return verdict(program, traces)


def verdict(program: Program, traces: list[dict[str, Any]]) -> str | None:
    ranks = [RankState(trace["events"]) for trace in traces]
    said = Simulation(program, ranks).run()
    if said:
        return said
    for rank, (state, trace) in enumerate(zip(ranks, traces, strict=True)):
        error = trace["error"]
        if error is None and state.events:
            return f"rank {rank} ended without an error in a pass that another rank took no part in"
        if error is not None and not error["named"] and not is_documented(error):
            return f"rank {rank} raised an error without a name: {error['where']}"
    errors = [f"rank {rank}: {t['error']['where']}" for rank, t in enumerate(traces) if t["error"]]
    if errors and not may_raise(program, ranks, traces):
        return "a legitimate program raised: " + "\n".join(errors)
    return None


def is_documented(error: dict[str, Any]) -> bool:
    return error["type"] == "RuntimeError" and "doesn't have any parameter that requires a gradient" in error["text"]


def is_apart(program: Program) -> bool:
    """Whether some ranks are told to do something else, or to fail."""
    everyone = list(range(program["ranks"]))
    ops = [op for step in program["steps"] for op in step["ops"]]
    limited = [x.get(key, everyone) for x in (*program["steps"], *ops) for key in ("only", "fails", "fails_hook")]
    return any(ranks != everyone for ranks in limited) or any(
        key in x for x in (program, *ops) for key in ("differs", "hook_on", "no_sync_on")
    )


def may_raise(program: Program, ranks: list["RankState"], traces: list[dict[str, Any]]) -> bool:
    if is_apart(program) or any(t["error"] and not t["error"]["named"] for t in traces):
        return True
    patterns = {used for state in ranks for used in state.used}
    unused = any(state.has_unused for state in ranks)
    types = {t["error"]["type"] for t in traces if t["error"]}
    options = program["options"]
    if options.get("static_graph"):
        return types <= {"UnusedParameterError"} and (len(patterns) > 1 or unused)
    return types <= {"UnusedParameterError"} and unused and not options.get("find_unused_parameters")


@dataclass
class RankState:
    """A rank's `.grad` by name: what is reduced already, and what this rank has added since."""

    events: list[tuple[str, Any]]
    reduced: dict[str, Any] = field(default_factory=dict)
    added: dict[str, Any] = field(default_factory=dict)
    used: list[frozenset[str]] = field(default_factory=list)
    has_unused: bool = False
    passes: int = 0

    def total(self, name: str) -> Any:
        return _plus(self.reduced.get(name), self.added.get(name))

    def add(self, delta: dict[str, Any]) -> None:
        for name, value in delta.items():
            self.added[name] = _plus(self.added.get(name), value)

    def zero(self, how: str) -> None:
        if how == "none":
            self.reduced, self.added = {}, {}
        elif how == "zeros":
            names = {*self.reduced, *self.added}
            totals = {name: self.total(name) for name in names}
            self.reduced = {name: total * 0 for name, total in totals.items() if total is not None}
            self.added = {}


def _plus(a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else a + b


class Simulation:
    def __init__(self, program: Program, ranks: list[RankState]) -> None:
        self.ranks = ranks
        self.reduction = program["options"].get("reduction", "mean")
        self.tolerance = LOSSY.get(program["hook"] or "", 1e-4)
        self.is_lossy = program["hook"] in LOSSY
        self.largest_term: dict[str, float] = {}

    def run(self) -> str | None:
        """Goes through the events of all ranks, pass by pass; returns the first gradient that is wrong."""
        while True:
            for rank, state in enumerate(self.ranks):
                said = self.to_next_pass(rank, state)
                if said:
                    return said
            if not all(state.events for state in self.ranks):
                return self.completed_alone()
            self.reduce()

    def completed_alone(self) -> str | None:
        for rank, state in enumerate(self.ranks):
            if any(kind == "seen" for kind, _ in state.events[1:2]):
                return f"rank {rank} completed pass {state.passes + 1}, in which another rank took no part"
        return None

    def to_next_pass(self, rank: int, state: RankState) -> str | None:
        while state.events and state.events[0][0] != "sync":
            kind, what = state.events.pop(0)
            match kind:
                case "zero":
                    state.zero(what)
                case "drop":
                    for name in what:
                        state.reduced.pop(name, None)
                        state.added.pop(name, None)
                case "local":
                    state.add(what)
                case "seen":
                    said = self.compare(state, what)
                    if said:
                        return f"rank {rank}, after pass {state.passes}: {said}"
        return None

    def reduce(self) -> None:
        for state in self.ranks:
            _, delta = state.events.pop(0)
            state.add(delta)
            state.passes += 1
            if delta:
                state.used.append(frozenset(n for n, value in delta.items() if value is not None))
                state.has_unused |= any(value is None for value in delta.values())
        names = {name for state in self.ranks for name in (*state.reduced, *state.added)}
        for name in names:
            terms = [np.abs(t).max() for state in self.ranks if (t := state.total(name)) is not None]
            self.largest_term[name] = max([self.largest_term.get(name, 0.0), *terms])
            value = self.reduced(name)
            for state in self.ranks:
                state.reduced[name] = value
        for state in self.ranks:
            state.added = {}

    def reduced(self, name: str) -> Any:
        count = len(self.ranks)
        if all(state.total(name) is None for state in self.ranks):
            return None
        weights = [rank + 1 if self.reduction == "weighted_mean" else 1 for rank in range(count)]
        scale = 1.0 if self.reduction == "sum" else 1.0 / sum(weights)
        before = sum(_or_zero(state.reduced.get(name)) * w for state, w in zip(self.ranks, weights, strict=True))
        added = sum(_or_zero(state.added.get(name)) * w for state, w in zip(self.ranks, weights, strict=True))
        return before / sum(weights) + added * scale

    def compare(self, state: RankState, seen: dict[str, Any]) -> str | None:
        for name, have in seen.items():
            if self.reduction == "sum" and state.added.get(name) is not None and state.reduced.get(name) is not None:
                continue  # `.grad` holds the reduced part divided by the number of ranks until the next reduction
            want = state.total(name)
            if (want is None) != (have is None):
                return f"{name}: .grad is {'missing' if have is None else 'there'}, and should not be: {have}"
            if want is None:
                continue
            worst, largest = np.abs(want - have).max(), np.abs(want).max()
            if self.is_lossy:
                largest = max(largest, self.largest_term.get(name, 0.0))
            if not worst <= self.tolerance * largest + 1e-6:
                return f"{name}: differs by {worst:g} of {largest:g}: {have.ravel()[:3]}, not {want.ravel()[:3]}"
        return None


def _or_zero(value: Any) -> Any:
    return 0.0 if value is None else value
