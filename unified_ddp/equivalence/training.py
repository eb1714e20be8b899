"""Rungs on training: one optimizer's update beside the other's, and both sides' free-running steps and losses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from unified_ddp.equivalence import noise
from unified_ddp.equivalence.judge import hint, judged
from unified_ddp.equivalence.observe import Observer
from unified_ddp.equivalence.results import Curve, Finding, Measure, Verdict
from unified_ddp.equivalence.side import Arrays, Trajectory
from unified_ddp.equivalence.tolerance import Allowance, measure

if TYPE_CHECKING:
    from unified_ddp.equivalence.mapping.mapping import Mapping


_UPDATE_RELATIVE = {"float64": 1e-6}
"""Of an update: optax keeps schedules in float32 beside float64 weights. In float32 and below, an optimizer's own
constants, such as Adam's 1 - 0.999, keep three digits."""

_UPDATE_RELATIVE_ELSE = 1e-3
_WEIGHT_ULPS = 64
"""An update is what a weight changed by, so that it carries the rounding of the weight."""

_RUNS = 2
_BAND_RUNS = 4
_BAND_FACTOR = 4.0

Named = Callable[[str, str], tuple[str, tuple[str, ...]]]


@dataclass(frozen=True)
class Training:
    """Both sides' training from equal weights.

    Attributes:
        observers: the sides.
        values: their weights.
        batches: the first side's, in the order of use.
        dtype: asked for.
        seed: of jitter.
        named: names of a tensor of the second side on either side.
    """

    observers: tuple[Observer, Observer]
    values: tuple[Arrays, Arrays]
    batches: Sequence[Any]
    dtype: str
    seed: int
    named: Named

    @property
    def mapping(self) -> "Mapping":
        """From the first side's tensors to the second's."""
        return self.observers[0].mapping

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The runs': the one asked for, and float64."""
        return ("float64",) if self.dtype == "float64" else (self.dtype, "float64")

    def update(self) -> list[Finding]:
        """Gives both optimizers the same gradients: the second side's of the first batches, in sizes that vary."""
        second, shapes = self.observers[1], self.observers[0].shapes
        random = np.random.default_rng(self.seed)
        given: list[Arrays] = []
        known: list[Arrays] = [
            second.side.evaluate(self.values[1], second.batch(batch), "float64").gradients
            for batch in self.batches[: len(self.batches)][:_DISTINCT]
        ]
        for step in range(len(self.batches)):
            factor = 10 ** random.uniform(-1, 1)
            given.append({name: grad * factor for name, grad in known[step % len(known)].items()})
        pulled = [self.mapping.pull_back(grads, shapes) for grads in given]
        runs = {}
        for dtype in self.dtypes:
            states = [
                observer.side.update(values, grads, dtype)
                for observer, values, grads in zip(self.observers, self.values, (pulled, given), strict=True)
            ]
            runs[dtype] = self._moves(states[0], states[1])
        return [
            self._finding(
                "update", name, step, {d: self._of_update(d, *runs[d][step][name]) for d in runs}, runs, note=True
            )
            for step in range(len(given))
            for name in runs["float64"][step]
        ]

    def _moves(
        self, first: Sequence[Arrays], second: Sequence[Arrays]
    ) -> list[dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]]:
        """Returns by step and tensor what either side's weights moved by in all, and the weights."""
        names = [n for n in second[0] if n in self.mapping.sources]
        start = self.mapping.carry(_wide(self.values[0]), names)
        moves = []
        for ours, theirs in zip(first, second, strict=True):
            made = self.mapping.carry({**_wide(self.values[0]), **_wide(ours)}, names)
            moves.append({n: (made[n] - start[n], _widened(theirs[n]) - start[n], start[n]) for n in names})
        return moves

    def _of_update(self, dtype: str, first: np.ndarray, second: np.ndarray, weight: np.ndarray) -> Measure:
        extra = _WEIGHT_ULPS * _EPSILON[dtype] * (np.abs(weight) + np.abs(first))
        relative = _UPDATE_RELATIVE.get(dtype, _UPDATE_RELATIVE_ELSE)
        return measure(first, second, Allowance(dtype, extra=extra, relative=relative))

    def _finding(
        self, rung: str, name: str, step: int, measures: dict[str, Measure], runs: dict[str, Any], *, note: bool
    ) -> Finding:
        ours, theirs = self.named("parameter", name)
        bare = Finding(
            rung,
            ours,
            theirs,
            "parameter",
            Verdict.PASS,
            measures.get(self.dtype) if self.dtype != "float64" else None,
            measures.get("float64"),
            step=step,
        )
        first, second, *_ = runs[max(measures)][step][name]
        return judged(bare, note=hint(first, second) if note else "")

    def steps(self, note: Callable[[str], None]) -> list[Finding]:
        """Trains both sides and compares weights and buffers after each step."""
        runs: dict[str, list[dict[str, tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]]]] = {}
        for dtype in self.dtypes:
            try:
                runs[dtype] = self._trained(dtype)
            except Exception as error:
                if dtype != "float64" or len(self.dtypes) == 1:
                    raise
                note(f"float64 cannot arbitrate training, as a side does not train in it: {type(error).__name__}")
        findings = []
        some = next(iter(runs.values()))
        for step, tensors in enumerate(some):
            for name in tensors:
                measures = {}
                for dtype, steps in runs.items():
                    first, second, weight, a, b = steps[step][name]
                    extra = _WEIGHT_ULPS * _EPSILON[dtype] * np.abs(weight) * np.sqrt(step + 1)
                    relative = _UPDATE_RELATIVE.get(dtype, _UPDATE_RELATIVE_ELSE)
                    measures[dtype] = measure(first, second, Allowance(dtype, a, b, extra=extra, relative=relative))
                findings.append(self._finding("steps", name, step, measures, runs, note=True))
        return findings

    def _trained(self, dtype: str) -> Any:
        paths = [self._train(o, v, dtype) for o, v in zip(self.observers, self.values, strict=True)]
        moves = self._moves(
            [_state(p, i) for i, p in _steps_of(paths[0])], [_state(p, i) for i, p in _steps_of(paths[1])]
        )
        learnt = [self._noise(o, v, dtype, p) for o, v, p in zip(self.observers, self.values, paths, strict=True)]
        return [
            {name: (*parts, learnt[0][step][name], learnt[1][step][name]) for name, parts in tensors.items()}
            for step, tensors in enumerate(moves)
        ]

    def _train(
        self, observer: Observer, values: Arrays, dtype: str, move: Callable[[Any, int], Any] | None = None
    ) -> Trajectory:
        inputs = [observer.batch(batch) for batch in self.batches]
        if move:
            inputs = [move(batch, number) for number, batch in enumerate(inputs)]
        return observer.side.train(values, inputs, dtype)

    def _noise(self, observer: Observer, values: Arrays, dtype: str, path: Trajectory) -> list[dict[str, np.ndarray]]:
        """By step and tensor of the second side, how much rounding moves it; see `noise`."""
        carried = [self._carried(observer, path)]
        deviations: list[dict[str, list[np.ndarray]]] = [{n: [] for n in step} for step in carried[0]]
        for run in range(_RUNS):
            number = self.seed + run
            if dtype == "float64":
                pair = [
                    self._carried(
                        observer,
                        self._train(
                            observer,
                            noise.moved(values, number, sign),
                            dtype,
                            partial(_moved_input, seed=number, sign=sign),
                        ),
                    )
                    for sign in (1, -1)
                ]
                for step, tensors in enumerate(deviations):
                    for name, found in tensors.items():
                        plus, minus = (p[step][name] for p in pair)
                        found.append(noise.second_difference(plus, minus, carried[0][step][name]))
                continue
            cast = {name: noise.in_dtype(array, dtype) for name, array in values.items()}
            moved = self._carried(
                observer,
                self._train(
                    observer,
                    noise.jitter(cast, number),
                    dtype,
                    partial(_jittered_input, seed=number),
                ),
            )
            for step, tensors in enumerate(deviations):
                for name, found in tensors.items():
                    found.append(np.abs(moved[step][name] - carried[0][step][name]))
        return [{name: noise.rms_by_row(found) for name, found in tensors.items()} for tensors in deviations]

    def _carried(self, observer: Observer, path: Trajectory) -> list[Arrays]:
        states = [_wide(_state(path, i)) for i in range(len(path.losses))]
        if not observer.is_first:
            return [{n: v for n, v in state.items() if n in self.mapping.sources} for state in states]
        names = list(self.mapping.sources)
        return [self.mapping.carry({**_wide(self.values[0]), **state}, names) for state in states]

    def curve(self, *, same_programs: bool) -> tuple[list[Finding], Curve]:
        """Trains both sides; the second's losses are judged by a band of the first's with inputs moved by one ULP.

        Args:
            same_programs: float64 has found the steps equal, so that what leaves the band is precision.
        """
        dtype = self.dtype
        first, second = (self._train(o, v, dtype).losses for o, v in zip(self.observers, self.values, strict=True))
        runs = []
        for run in range(_BAND_RUNS):
            cast = {name: noise.in_dtype(array, dtype) for name, array in self.values[0].items()}
            number = self.seed + run
            move = partial(_jittered_input, seed=number)
            runs.append(self._train(self.observers[0], noise.jitter(cast, number), dtype, move).losses)
        base = np.asarray(first)
        spread = np.maximum.accumulate(np.max(np.abs(np.asarray(runs) - base), axis=0))
        travelled = np.maximum.accumulate(np.abs(base - base[0]))
        constants = 0.0 if dtype == "float64" else _UPDATE_RELATIVE_ELSE * travelled
        width = _BAND_FACTOR * spread + 8 * _EPSILON[dtype] * np.abs(base) + constants
        findings = []
        for step, (ours, theirs, allowed) in enumerate(zip(first, second, width, strict=True)):
            gap = measure(np.asarray(ours), np.asarray(theirs), Allowance(dtype, extra=allowed))
            found = judged(Finding("curve", "loss", ("loss",), "loss", Verdict.PASS, gap, step=step))
            if found.verdict is Verdict.DIFFERS and same_programs:
                found = Finding("curve", "loss", ("loss",), "loss", Verdict.PRECISION, gap, step=step)
            findings.append(found)
        low, high = base - width, base + width
        return findings, Curve(tuple(first), tuple(second), tuple(low.tolist()), tuple(high.tolist()))


_DISTINCT = 4
_EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def _moved_input(batch: Any, index: int, *, seed: int, sign: int) -> Any:
    return noise.moved_batch(batch, seed + 100 * index, sign)


def _jittered_input(batch: Any, index: int, *, seed: int) -> Any:
    return noise.jitter_batch(batch, seed + 100 * index)


def _steps_of(path: Trajectory) -> list[tuple[int, Trajectory]]:
    return [(i, path) for i in range(len(path.losses))]


def _state(path: Trajectory, step: int) -> Arrays:
    return {**path.parameters[step], **path.buffers[step]}


def _widened(array: np.ndarray) -> np.ndarray:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _wide(values: Arrays) -> Arrays:
    return {name: _widened(array) for name, array in values.items()}
