"""What must be equal in all processes before anything is broadcast."""

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from unified_ddp.jax.pytrees.schema import leaf_name
from unified_ddp.plan import ParamSpec
from unified_ddp.ranks.construction import any_spec, check_construction
from unified_ddp.ranks.group import Gathering


def check_processes(
    gathering: Gathering,
    params: Any,
    buffers: Any,
    optimizer_state: Any,
    trained: Collection[str],
    options: dict[str, Any],
) -> None:
    """Compares trees of arrays, of which `trained` names parameters, and options with those of the other processes.

    Raises:
        ConstructionMismatchError: in every process, naming the first difference and the processes.
    """
    leaves = jax.tree_util.tree_leaves_with_path(optimizer_state)
    shapes = ", ".join(f"{leaf_name(path)}: {list(jnp.shape(leaf))}" for path, leaf in leaves)
    told = options | {"optimizer_state": f"({shapes})", "jax": jax.__version__}
    told = {name: str(value) for name, value in told.items()}
    check_construction(gathering, _specs(params, trained), _specs(buffers, ()), told, member="process")


def _specs(tree: Any, trained: Collection[str]) -> list[ParamSpec]:
    """All leaves, also those that are frozen or have no gradient."""
    named = ((leaf_name(path), jax.typeof(leaf)) for path, leaf in jax.tree_util.tree_leaves_with_path(tree))
    return [any_spec(name, kind.shape, str(kind.dtype), trainable=name in trained) for name, kind in named]
