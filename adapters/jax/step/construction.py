"""What must be equal in all processes before anything is broadcast."""

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from unified_ddp.errors import PlanError
from unified_ddp.jax.pytrees.schema import leaf_name
from unified_ddp.jax.step.processes import ProcessGathering
from unified_ddp.plan import ParamSpec
from unified_ddp.ranks.construction import check_construction


@dataclasses.dataclass(frozen=True)
class Construction:
    """Parameters, buffers and options.

    Attributes:
        parameters: all leaves of the params, in tree order, also those that are frozen or have no gradient.
        buffers: all leaves of the module state.
        options: by name.
    """

    parameters: list[ParamSpec]
    buffers: list[ParamSpec]
    options: dict[str, str]

    @classmethod
    def of(
        cls, params: Any, buffers: Any, optimizer_state: Any, trained: Collection[str], options: dict[str, Any]
    ) -> "Construction":
        """Describes pytrees of arrays; what is known of no leaf but JAX's (keys, 4-bit integers) counts as options."""
        parameters, rest = _specs(params, trained)
        described, more = _specs(buffers, ())
        leaves = jax.tree_util.tree_leaves_with_path(optimizer_state)
        shapes = ", ".join(f"{leaf_name(path)}: {list(jnp.shape(leaf))}" for path, leaf in leaves)
        options = options | {"optimizer_state": f"({shapes})", "jax": jax.__version__, "other_leaves": rest + more}
        return cls(parameters, described, {name: str(value) for name, value in options.items()})

    def check(self, gathering: ProcessGathering) -> None:
        """Compares it with that of the other processes.

        Raises:
            ConstructionMismatchError: in every process, naming the first difference and the processes.
        """
        description = {
            "parameters": [_tensor(spec) | {"trainable": spec.trainable} for spec in self.parameters],
            "buffers": [_tensor(spec) for spec in self.buffers],
            "options": self.options,
        }
        check_construction(gathering, description, member="process")


def _specs(tree: Any, trained: Collection[str]) -> tuple[list[ParamSpec], list[str]]:
    """Returns the leaves that the core can describe, and the others as text."""
    specs, rest = [], []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name, kind = leaf_name(path), jax.typeof(leaf)
        try:
            specs.append(ParamSpec(name, kind.shape, str(kind.dtype), trainable=name in trained))
        except PlanError:
            rest.append(f"{name}: {kind}")
    return specs, rest


def _tensor(spec: ParamSpec) -> dict[str, Any]:
    return {"name": spec.name, "shape": list(spec.shape), "dtype": spec.dtype}
