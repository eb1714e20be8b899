"""A pair of sides that are to be one model."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unified_ddp.equivalence.results import Report
from unified_ddp.equivalence.side import Arrays, Side

__all__ = ["Pair"]

Progress = Callable[[str, int, int], None]


class Pair:
    """Two programs that are to be one model, with the batches on which they are compared.

    Args:
        first: gives coordinates and names, usually a `TorchSide`.
        second: usually a `JaxSide`; two sides of one framework are a pair as well.
        batches: at least one; trees (dicts, tuples, lists) of numpy arrays as the first side takes them, with the batch
            axis first.
        layout: how the second side's arrays lie, by key of the batch or the output: {"images": "NCHW -> NHWC"}; a key of an
            output is "outputs" or "outputs.KEY". Or a function from the first side's batch to the second's.
        mapping: a `Mapping`, or the path of a file written by `pair.mapping.save`; None finds one.
        rename: pairs (pattern, replacement) of regular expressions, applied to the first side's names before names are
            compared.
        rules: by the second side's name the text of its rule, such as "attn.in_proj_weight | take 0 0:64 | permute 1 0".
        tied: the second side's names that share one tensor of the first side, and are meant to.
        ignore: names on either side, or patterns with *, that have no counterpart.
        seed: of scrambled weights and jitter.
    """

    def __init__(
        self,
        first: Side,
        second: Side,
        batches: Sequence[Any],
        *,
        layout: Mapping[str, str] | Callable[[Any], Any] | None = None,
        mapping: Any = None,
        rename: Sequence[tuple[str, str]] = (),
        rules: Mapping[str, str | Sequence[str]] | None = None,
        tied: Sequence[str] = (),
        ignore: Sequence[str] = (),
        seed: int = 0,
    ) -> None:
        raise NotImplementedError

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
            ranks: of the reduced rung.
            steps: of the steps and curve rungs.
            dtype: "float32", "float64", "bfloat16" or "float16"; float64 is run beside any other, and arbitrates.
            weights: "scrambled" or "as they are", in which case those of the first side are carried over.
            power: perturb each tensor to learn whether any rung would notice.
            progress: is told the phase and how much of it is done.
        """
        raise NotImplementedError

    def to_jax(self, values: Arrays | None = None) -> Arrays:
        """Returns the second side's weights made of the first side's (its own if `values` is None), by name."""
        raise NotImplementedError

    def to_torch(self, values: Arrays | None = None) -> Arrays:
        """Returns the first side's weights made of the second side's (its own if `values` is None), by name."""
        raise NotImplementedError
