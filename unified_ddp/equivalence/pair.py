"""A pair of sides that are to be one model."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unified_ddp.equivalence.batches import Layout
from unified_ddp.equivalence.errors import EquivalenceError
from unified_ddp.equivalence.ladder import Ladder, Settings
from unified_ddp.equivalence.mapping.find import Overrides, find_mapping
from unified_ddp.equivalence.mapping.mapping import Mapping as TensorMapping
from unified_ddp.equivalence.mapping.probe import probe
from unified_ddp.equivalence.noise import in_dtype
from unified_ddp.equivalence.observe import Observer
from unified_ddp.equivalence.reporting import Report
from unified_ddp.equivalence.results import RUNGS
from unified_ddp.equivalence.scramble import scrambled
from unified_ddp.equivalence.side import Arrays, Side

DTYPES = ("float32", "float64", "bfloat16", "float16")
_WEIGHTS = ("scrambled", "as they are")

Progress = Callable[[str, int, int], None]


class Pair:
    """Two programs that are to be one model, with the batches on which they are compared.

    Args:
        first: gives coordinates and names, usually a `TorchSide`.
        second: usually a `JaxSide`; two sides of one framework are a pair as well.
        batches: at least one; trees (dicts, tuples, lists) of numpy arrays as the first side takes them, with the
            batch axis first.
        layout: how the second side's arrays lie, by key of the batch or the output: {"images": "NCHW -> NHWC"}; a key
            of an output is "outputs" or "outputs.KEY". Or a function from the first side's batch to the second's.
        mapping: a `Mapping`, or the path of a file written by `pair.mapping.save`; None finds one.
        rename: pairs (pattern, replacement) of regular expressions, applied to the paths of the first side's modules
            before names are compared.
        rules: by the second side's name the text of its rule, such as "attn.in_proj_weight | take 0 0:64".
        tied: the second side's names that share one tensor of the first side, and are meant to.
        ignore: names on either side, or patterns with *, that have no counterpart.
        seed: of scrambled weights and jitter.

    Raises:
        EquivalenceError: there is no batch, or torch comes second beside JAX.
    """

    def __init__(
        self,
        first: Side,
        second: Side,
        batches: Sequence[Any],
        *,
        layout: Layout = None,
        mapping: TensorMapping | str | Path | None = None,
        rename: Sequence[tuple[str, str]] = (),
        rules: Mapping[str, str | Sequence[str]] | None = None,
        tied: Sequence[str] = (),
        ignore: Sequence[str] = (),
        seed: int = 0,
    ) -> None:
        if first.framework != second.framework and second.framework == "torch":
            raise EquivalenceError("of a torch and a JAX side, torch comes first: Pair(torch_side, jax_side, batches)")
        if isinstance(batches, Mapping | np.ndarray) or not len(batches):
            raise EquivalenceError("batches is a list of batches, at least one, each a tree of numpy arrays")
        self.first, self.second, self.batches = first, second, list(batches)
        self.layout, self.seed = layout, seed
        self.overrides = Overrides(tuple(rename), rules, tuple(tied), tuple(ignore))
        self._mapping = TensorMapping.load(mapping) if isinstance(mapping, str | Path) else mapping
        self.mapping_note = ""
        if self._mapping is not None:
            self._mapping.require_fit(first.tensors(), second.tensors())

    @property
    def mapping(self) -> TensorMapping:
        """The mapping; found, and probed where names leave it open, when it is first asked for.

        Raises:
            MappingError: a tensor has no counterpart; the text says what to add.
        """
        if self._mapping is None:
            typed = (self.first.framework, self.second.framework) == ("torch", "jax")
            found = find_mapping(self.first.tensors(), self.second.tensors(), self.overrides, typed=typed)
            self._mapping, self.mapping_note = probe(found, self.second.tensors(), self._forward_error)
        return self._mapping

    def observers(self, mapping: TensorMapping | None = None) -> tuple[Observer, Observer]:
        """Returns both sides in shared coordinates."""
        shapes = {t.name: t.shape for t in self.first.tensors()}
        chosen = self.mapping if mapping is None else mapping
        return (
            Observer(self.first, True, chosen, shapes, self.layout),
            Observer(self.second, False, chosen, shapes, self.layout),
        )

    def values(self, weights: str = "scrambled", mapping: TensorMapping | None = None) -> tuple[Arrays, Arrays]:
        """Returns the first side's weights, scrambled or as they are, and the second side's made of them.

        The numbers are of the weights' own dtypes, held in float64: a sum of two biases is then exact.
        """
        values = self.first.values()
        if weights == "scrambled":
            values = scrambled(values, self.first.tensors(), self.seed)
        values = {name: in_dtype(array, "float64") for name, array in values.items()}
        carried = (self.mapping if mapping is None else mapping).carry(values)
        return values, {**self.second.values(), **carried}

    def _forward_error(self, mapping: TensorMapping) -> float:
        values = self.values("scrambled", mapping)
        observers = [observer.forward_only() for observer in self.observers(mapping)]
        runs = [
            observer.observe(own, observer.batch(self.batches[0]), "float64")
            for observer, own in zip(observers, values, strict=True)
        ]
        kept = [{k: v for k, v in run.items() if k[0] in ("output", "loss")} for run in runs]
        return max(_relative(a, b) for a, b in zip(*(list(run.values()) for run in kept), strict=True))

    def check(
        self,
        until: str = "gradients",
        *,
        ranks: int = 2,
        steps: int = 20,
        dtype: str = "float32",
        weights: str = "scrambled",
        power: bool = True,
        progress: Progress = lambda phase, done, total: None,
    ) -> Report:
        """Compares rung by rung.

        Args:
            until: the last rung, one of `RUNGS`.
            ranks: of the reduced rung; each batch's rows are shared evenly.
            steps: of the update, steps and curve rungs; batches are used in turn.
            dtype: "float32", "float64", "bfloat16" or "float16"; float64 is run beside any other, and arbitrates.
            weights: "scrambled" or "as they are", in which case those of the first side are carried over.
            power: perturb each tensor to learn whether any rung would notice.
            progress: is told the phase and how much of it is done.

        Raises:
            EquivalenceError: the pair cannot be compared: a side is random, an output has no counterpart, a side has no
                optimizer and `until` needs it.
            MappingError: a tensor has no counterpart.
        """
        for what, value, allowed in (("until", until, RUNGS), ("dtype", dtype, DTYPES), ("weights", weights, _WEIGHTS)):
            if value not in allowed:
                raise EquivalenceError(f"{what}={value!r}: give one of {', '.join(map(repr, allowed))}")
        return Ladder(self, Settings(until, ranks, steps, dtype, weights, power, progress)).climb()

    def to_jax(self, values: Arrays | None = None) -> Arrays:
        """Returns the second side's weights made of the first side's (its own if `values` is None), by name."""
        return self.mapping.carry(self.first.values() if values is None else values)

    def to_torch(self, values: Arrays | None = None) -> Arrays:
        """Returns the first side's weights made of the second side's (its own if `values` is None), by name."""
        shapes = {t.name: t.shape for t in self.first.tensors()}
        return self.mapping.invert(self.second.values() if values is None else values, shapes)


def _relative(first: np.ndarray, second: np.ndarray) -> float:
    if first.shape != second.shape:
        return float("inf")
    a, b = first.astype(np.complex128), second.astype(np.complex128)
    error = float(np.linalg.norm((a - b).ravel()))
    size = float(np.linalg.norm(a.ravel()))
    return float("inf") if not np.isfinite(error) else error / size if size else error
