"""Where the parameters of a plan lie in pytrees."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from unified_ddp.errors import PlanError
from unified_ddp.jax.pytrees.schema import named_leaves
from unified_ddp.jax.pytrees.trainable import frozen_names
from unified_ddp.plan import BucketPlan, ParamSpec, bucket_caps, plan_in_ready_order


class PlannedParams:
    """The trained parameters of a model: in buckets, and in every pytree that has their names.

    Args and errors are those of `GradientAveraging`.

    Attributes:
        plan: the buckets.
        names: of the trained parameters, in tree order.
    """

    def __init__(
        self,
        params: Any,
        trainable: Any | Callable[[str], bool] | None,
        plan: BucketPlan | None,
        bucket_cap_mb: float | None,
        bucket_cap_mb_list: Sequence[float] | None,
    ) -> None:
        self._frozen = frozen_names(params, trainable)
        specs = tuple(leaf for leaf in self._leaves(params).values() if isinstance(leaf, ParamSpec))
        if not specs:
            raise PlanError(
                "params has no leaf that can have a gradient"
                + (" and is not frozen" if self._frozen else "")
                + "; give a pytree with floating-point arrays"
            )
        if plan is None:
            plan = plan_of(specs, tuple(bucket_caps(bucket_cap_mb, bucket_cap_mb_list)))
        elif bucket_cap_mb is not None or bucket_cap_mb_list is not None:
            raise ValueError("plan already says what is in each bucket; leave bucket_cap_mb and bucket_cap_mb_list out")
        self.plan = plan
        self.names = tuple(spec.name for spec in specs)
        self.find(params)

    def find(self, tree: Any) -> "PlannedLeaves":
        """Returns the leaves of a pytree of params or gradients.

        Raises:
            PlanError: names, shapes or dtypes differ from the plan; the first difference is named.
        """
        have, planned = self._leaves(tree), {spec.name: spec for spec in self.plan.params}
        for leaf in have.values():
            if isinstance(leaf, ParamSpec):
                _require_same(leaf, planned.get(leaf.name))
        for name in planned:
            if not isinstance(have.get(name), ParamSpec):
                held = f"holds it as {have[name]}, which has no gradient" if name in have else "has no such leaf"
                raise PlanError(
                    f"the plan has the parameter '{name}', but the pytree {held}; "
                    "give a pytree with the names of the plan, or plan again from this pytree"
                )
        position = {name: i for i, name in enumerate(have)}
        leaves, treedef = jax.tree.flatten(tree)
        return PlannedLeaves(leaves, treedef, tuple(position[name] for name in planned))

    def _leaves(self, tree: Any) -> dict[str, ParamSpec | str]:
        """As `named_leaves`, where frozen parameters are leaves without gradient."""
        leaves = named_leaves(tree)
        for name in self._frozen & leaves.keys():
            if isinstance(leaf := leaves[name], ParamSpec):
                leaves[name] = f"frozen {leaf.dtype}"
        return leaves


@dataclasses.dataclass(frozen=True)
class PlannedLeaves:
    """The leaves of one pytree, and the position of each parameter of the plan among them."""

    leaves: list[Any]
    treedef: jax.tree_util.PyTreeDef
    positions: tuple[int, ...]

    @property
    def values(self) -> list[Any]:
        """The parameters, or their gradients, in the order of the plan."""
        return [self.leaves[position] for position in self.positions]

    @property
    def trained(self) -> Any:
        """The tree with None in place of every leaf that is frozen or has no gradient."""
        return self.alone(self.values)

    def replaced(self, values: Sequence[Any]) -> Any:
        """Returns the tree with other values, in the order of the plan."""
        return self._filled(self.leaves, values)

    def alone(self, values: Sequence[Any]) -> Any:
        """Returns the tree of other values, in the order of the plan, with None in place of all other leaves."""
        return self._filled([None] * len(self.leaves), values)

    def _filled(self, leaves: list[Any], values: Sequence[Any]) -> Any:
        by_position = dict(zip(self.positions, values, strict=True))
        return jax.tree.unflatten(self.treedef, [by_position.get(i, leaf) for i, leaf in enumerate(leaves)])


@functools.lru_cache(maxsize=256)
def plan_of(specs: tuple[ParamSpec, ...], caps: tuple[int, ...]) -> BucketPlan:
    """Returns the buckets of parameters, last ones first; the same object for the same specs and caps (in bytes)."""
    return plan_in_ready_order(specs, caps)


def _require_same(spec: ParamSpec, planned: ParamSpec | None) -> None:
    if planned is None:
        raise PlanError(
            f"the pytree has the parameter '{spec.name}', which is not in the plan; give a pytree with the names of "
            "the plan (flax: the 'params' collection alone), or plan again from this pytree"
        )
    for what in ("shape", "dtype"):
        have, want = getattr(spec, what), getattr(planned, what)
        if have != want:
            raise PlanError(
                f"parameter '{spec.name}' has {what} {have} in the pytree and {want} in the plan; "
                "make them equal (pmap: plan from params without the leading replica axis), or plan again"
            )
