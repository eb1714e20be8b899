"""Which parameters are trained, as users say it: a pytree of bools, or a function of a name."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from unified_ddp.jax.pytrees.schema import named_leaves
from unified_ddp.plan import ParamSpec


def frozen_names(params: Any, trainable: Any | Callable[[str], bool] | None) -> frozenset[str]:
    """Returns the names of the parameters that are not to be trained.

    Args:
        params: the pytree.
        trainable: a pytree of bools that is a prefix of `params`, or a function that takes a name such as
            "conv1.kernel" and returns a bool; None trains all.

    Raises:
        TypeError: it is neither, or the function returns something else.
        ValueError: the structure of the pytree of bools does not fit `params`.
    """
    if trainable is None:
        return frozenset()
    leaves, flags = named_leaves(params), jax.tree.leaves(trainable)
    if flags and all(isinstance(flag, bool | np.bool_) for flag in flags):
        try:
            full = jax.tree.map(lambda flag, part: jax.tree.map(lambda _: flag, part), trainable, params)
        except ValueError as error:
            raise ValueError(f"trainable is a pytree of bools whose structure does not fit params: {error}") from error
        answers = dict(zip(leaves, jax.tree.leaves(full), strict=True))
    elif callable(trainable):
        answers = {name: trainable(name) for name, leaf in leaves.items() if isinstance(leaf, ParamSpec)}
    else:
        raise TypeError(f"trainable takes a pytree of bools or a function of a name, not {trainable!r}")
    for name, answer in answers.items():
        if not isinstance(answer, bool | np.bool_):
            raise TypeError(f"trainable takes a function that returns a bool, but it returned {answer!r} for {name!r}")
    return frozenset(name for name, answer in answers.items() if not answer)
