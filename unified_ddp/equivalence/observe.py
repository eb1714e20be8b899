"""What a side computes, in coordinates that both sides share: outputs and gradients as the first side has them.

Gradients of the second side are pulled back by the mapping's transpose. Weights and buffers of the first side are
carried over instead: where two tensors make one, as an LSTM's biases, only the second side's coordinates say what the
model is.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from unified_ddp.equivalence import noise
from unified_ddp.equivalence.batches import Layout, batch_size, flatten, map_arrays, take_rows, to_axes
from unified_ddp.equivalence.errors import EquivalenceError
from unified_ddp.equivalence.mapping.mapping import Mapping as TensorMapping
from unified_ddp.equivalence.side import Arrays, Evaluation, Side

Key = tuple[str, str]
"""Kind ("output", "loss", "buffer", "gradient") and name."""

Observed = dict[Key, np.ndarray]

RUNS = 3
"""Of noise."""


@dataclass(frozen=True)
class Observer:
    """One side of a pair, seen in shared coordinates.

    Attributes:
        side: what is observed.
        is_first: whether it gives the coordinates.
        mapping: from the first side's tensors to the second's.
        shapes: of the first side's tensors.
        layout: see `Pair`.
        gradients: whether to run the backward.
    """

    side: Side
    is_first: bool
    mapping: TensorMapping
    shapes: dict[str, tuple[int, ...]]
    layout: Layout
    gradients: bool = True

    def forward_only(self) -> "Observer":
        """Returns the same without gradients."""
        return replace(self, gradients=False)

    def batch(self, batch: Any) -> Any:
        """Returns the side's batch, made of the first side's."""
        return batch if self.is_first else laid_out(batch, self.layout)

    def observe(self, values: Arrays, batch: Any, dtype: str) -> Observed:
        """Runs the side.

        Args:
            values: the side's own.
            batch: the side's own, see `batch`.
            dtype: of the run.
        """
        return self.shared(self.side.evaluate(values, batch, dtype, gradients=self.gradients))

    def shared(self, run: Evaluation) -> Observed:
        """Returns a run's results in shared coordinates."""
        found: Observed = {("loss", "loss"): np.asarray(run.loss).reshape(())}
        found |= {("output", key): self._output(key, value) for key, value in run.outputs.items()}
        found |= {("buffer", name): value for name, value in self._buffers(run.buffers).items()}
        return found | {("gradient", name): grad for name, grad in self.pulled(run.gradients).items()}

    def pulled(self, gradients: Arrays) -> Arrays:
        """Returns the side's gradients by the first side's names, of mapped tensors only."""
        if not self.is_first:
            return self.mapping.pull_back(gradients, self.shapes)
        used = self.mapping.source_names()
        return {name: grad for name, grad in gradients.items() if name in used}

    def _output(self, key: str, value: np.ndarray) -> np.ndarray:
        if self.is_first or callable(self.layout) or not self.layout:
            return value
        for name in ("outputs",) if key == "output" else (f"outputs.{key}", "outputs"):
            if name in self.layout:
                before, _, after = self.layout[name].partition("->")
                return to_axes(value, f"{after.strip()} -> {before.strip()}", name)
        return value

    def _buffers(self, buffers: Arrays) -> Arrays:
        if not self.is_first:
            return {name: value for name, value in buffers.items() if name in self.mapping.sources}
        made = {
            name: sources
            for name, sources in self.mapping.sources.items()
            if all(source.name in buffers for source in sources)
        }
        return self.mapping.carry(buffers, list(made))

    def noise(
        self, values: Arrays, batch: Any, dtype: str, at: Observed, seed: int
    ) -> tuple[dict[Key, np.ndarray], str]:
        """Returns by tensor how much rounding moves it, see `rms_by_row`, and a note.

        Args:
            values: the side's own.
            batch: the side's own.
            dtype: of the run.
            at: what `observe` gave for these.
            seed: of the jitter.
        """
        deviations = self._movements(values, batch, dtype, at, seed)
        found = {key: noise.rms_by_row(parts) for key, parts in deviations.items()}
        permuted, note = self._permuted(values, batch, dtype, at)
        for key, part in permuted.items():
            found[key] = np.maximum(found[key], noise.rms_by_row([part]))
        return found, note

    def _movements(
        self, values: Arrays, batch: Any, dtype: str, at: Observed, seed: int
    ) -> dict[Key, list[np.ndarray]]:
        deviations: dict[Key, list[np.ndarray]] = {key: [] for key in at}
        for run in range(RUNS):
            number = seed + run
            if dtype == "float64":
                pair = [
                    self.observe(noise.moved(values, number, s), noise.moved_batch(batch, number, s), dtype)
                    for s in (1, -1)
                ]
                for key in at:
                    plus, minus = (_comparable(p[key], at[key]) for p in pair)
                    deviations[key].append(noise.second_difference(plus, minus, _wide(at[key])))
                continue
            cast = {name: noise.in_dtype(array, dtype) for name, array in values.items()}
            inputs = map_arrays(lambda array: noise.in_dtype(np.asarray(array), dtype), batch)
            moved = self.observe(noise.jitter(cast, number), noise.jitter_batch(inputs, number), dtype)
            for key in at:
                deviations[key].append(np.abs(_comparable(moved[key], at[key]) - _wide(at[key])))
        return deviations

    def _permuted(self, values: Arrays, batch: Any, dtype: str, at: Observed) -> tuple[Observed, str]:
        """Runs the rows in reverse; sums over the batch then round otherwise."""
        size = batch_size(batch)
        if size is None or size < 2:
            return {}, ""
        back = np.arange(size)[::-1]
        other = self.observe(values, take_rows(batch, back), dtype)
        found: Observed = {}
        for key, value in other.items():
            if key[0] == "output":
                if value.shape[:1] != (size,):
                    continue
                value = value[back]
            found[key] = np.abs(_comparable(value, at[key]) - _wide(at[key]))
        loss = float(np.abs(_wide(at["loss", "loss"])))
        if float(found["loss", "loss"]) > _ORDER[dtype] * loss:
            return (
                {},
                f"the {self.side.framework} side's loss depends on the order of the batch; its noise is learnt without",
            )
        return found, ""


_ORDER = {"float64": 1e-7, "float32": 1e-4, "float16": 1e-1, "bfloat16": 1e-1}
"""Relative change of the loss above which a reversed batch is another batch, and not the same one rounded otherwise."""


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _comparable(array: np.ndarray, like: np.ndarray) -> np.ndarray:
    if array.shape != like.shape:
        raise EquivalenceError(
            f"one side gave shape {like.shape} and, on the same inputs moved by one ULP, {array.shape}"
        )
    return _wide(array)


def laid_out(batch: Any, layout: Layout) -> Any:
    """Returns the second side's batch of the first's.

    Raises:
        EquivalenceError: `layout` names what the batch does not have.
    """
    if layout is None:
        return batch
    if callable(layout):
        return layout(batch)
    keys = set(flatten(batch, "batch"))
    for key in layout:
        if key not in keys and not key.startswith("outputs"):
            raise EquivalenceError(f"layout has {key!r}, but the batch has {sorted(keys)}; outputs go by 'outputs'")
    return _laid_out(batch, layout, "")


def _laid_out(tree: Any, layout: Mapping[str, str], path: str) -> Any:
    join: Callable[[Any], str] = lambda key: f"{path}.{key}" if path else str(key)  # noqa: E731
    if isinstance(tree, Mapping):
        return {key: _laid_out(value, layout, join(key)) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        keys = getattr(tree, "_fields", range(len(tree)))
        parts = [_laid_out(value, layout, join(key)) for key, value in zip(keys, tree, strict=True)]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    key = path or "batch"
    return to_axes(np.asarray(tree), layout[key], key) if key in layout else tree
