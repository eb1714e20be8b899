"""Values on their way between numpy and JAX, in the dtype of a run."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unified_ddp.equivalence.batches import map_arrays
from unified_ddp.equivalence.errors import EquivalenceError


def scalar(loss: Any) -> Any:
    """Returns the loss; raises EquivalenceError unless it is a real scalar."""
    shape = getattr(loss, "shape", None)
    if shape is None or np.prod(shape) != 1:
        raise EquivalenceError(
            f"the JAX loss function returned {type(loss).__name__} of shape {shape} as its loss; it returns a scalar, "
            "or (loss, outputs)"
        )
    return loss.reshape(())


def precision(dtype: str) -> Any:
    """Returns the context of a run: 64-bit types are on for float64, and as the user has them otherwise."""
    return jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext()


def cast(array: Any, dtype: str) -> np.ndarray:
    """Returns floating-point and complex arrays in a real dtype or its complex one; others as they are."""
    array = np.asarray(array)
    if np.iscomplexobj(array):
        return array.astype(np.complex128 if dtype == "float64" else np.complex64)
    return array.astype(jnp.dtype(dtype)) if jnp.issubdtype(array.dtype, jnp.floating) else array


def batch_in(batch: Any, dtype: str) -> Any:
    """Returns a batch of numpy arrays as JAX arrays, floating-point ones in the dtype."""
    return map_arrays(lambda array: jnp.asarray(cast(array, dtype)), batch)


def to_numpy(leaf: Any) -> np.ndarray:
    """Returns an array, or what an nnx variable holds, as a numpy array."""
    return np.asarray(leaf.get_value() if hasattr(leaf, "get_value") else leaf)
