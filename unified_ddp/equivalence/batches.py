"""Batches: trees (dicts, tuples, lists) of numpy arrays with the batch axis first."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from unified_ddp.equivalence.errors import EquivalenceError

Layout = Mapping[str, str] | Callable[[Any], Any] | None


def map_arrays(function: Callable[[Any], Any], tree: Any) -> Any:
    """Returns the tree with the function applied to each leaf; None stays."""
    if isinstance(tree, Mapping):
        return {key: map_arrays(function, value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        parts = [map_arrays(function, value) for value in tree]
        if hasattr(tree, "_fields"):
            return type(tree)(*parts)
        return type(tree)(parts)
    return None if tree is None else function(tree)


def flatten(tree: Any, alone: str) -> dict[str, Any]:
    """Returns leaves by path joined with dots; a tree that is one leaf has the name `alone`."""
    if isinstance(tree, Mapping):
        items = list(tree.items())
    elif hasattr(tree, "_fields"):
        items = list(zip(tree._fields, tree, strict=True))
    elif isinstance(tree, list | tuple):
        items = list(enumerate(tree))
    else:
        return {} if tree is None else {alone: tree}
    found = {}
    for key, value in items:
        for name, leaf in flatten(value, "").items():
            found[f"{key}.{name}" if name else str(key)] = leaf
    return found


def batch_size(batch: Any) -> int | None:
    """Returns the size of the first axis that all arrays share, or None if they share none."""
    sizes = {np.shape(leaf)[:1] for leaf in flatten(batch, "batch").values()}
    if len(sizes) != 1:
        return None
    (shape,) = sizes
    return shape[0] if shape else None


def take_rows(batch: Any, rows: Any) -> Any:
    """Returns the batch with these rows of every array."""
    return map_arrays(lambda array: np.asarray(array)[rows], batch)


def shards(batch: Any, ranks: int) -> list[Any]:
    """Returns equal shares of the rows, one a rank, in order.

    Raises:
        EquivalenceError: the arrays share no first axis, or it cannot be shared evenly.
    """
    size = batch_size(batch)
    if size is None or size % ranks or size < ranks:
        have = "arrays without a common first axis" if size is None else f"{size} rows"
        raise EquivalenceError(
            f"the batch has {have}, which {ranks} ranks cannot share evenly; give batches whose first axis is a "
            "multiple of the ranks, or another ranks="
        )
    share = size // ranks
    return [take_rows(batch, slice(rank * share, (rank + 1) * share)) for rank in range(ranks)]


def to_axes(array: np.ndarray, layout: str, key: str) -> np.ndarray:
    """Returns the array with its axes in another order.

    Args:
        array: any.
        layout: such as "NCHW -> NHWC": a letter an axis, the same letters on both sides.
        key: of the array, for the error's text.

    Raises:
        EquivalenceError: the layout is no such text, or does not fit the array.
    """
    before, arrow, after = (part.strip() for part in layout.partition("->"))
    if not arrow or sorted(before) != sorted(after) or len(set(before)) != len(before):
        raise EquivalenceError(f"layout[{key!r}] is {layout!r}; it is such as 'NCHW -> NHWC', each letter once a side")
    if len(before) != np.ndim(array):
        raise EquivalenceError(f"layout[{key!r}] is {layout!r}, but the array has shape {np.shape(array)}")
    return np.ascontiguousarray(np.transpose(array, [before.index(letter) for letter in after]))
