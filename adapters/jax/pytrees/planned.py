"""Where the parameters of a plan lie in pytrees."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from unified_ddp.errors import PlanError
from unified_ddp.jax.pytrees.schema import CACHE_SIZE, Schema, schema_of, without
from unified_ddp.jax.pytrees.trainable import frozen_names
from unified_ddp.plan import BucketPlan, ParamSpec, bucket_caps, plan_in_ready_order


class PlannedParams:
    """The trained parameters of a model: in buckets, and in every pytree that has their names.

    Args: see `DistributedDataParallel`.

    Attributes:
        plan: the buckets.
        names: of the trained parameters, in tree order.

    Raises:
        PlanError: no leaf can have a gradient, two have one name, or `plan` differs in names, shapes or dtypes.
        TypeError, ValueError: another argument is wrong.
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
        schema = self._schema(params)
        if not schema.specs:
            raise PlanError(
                "params has no leaf that can have a gradient"
                + (" and is not frozen" if self._frozen else "")
                + "; give a pytree with floating-point arrays"
            )
        if plan is None:
            plan = plan_of(schema, tuple(bucket_caps(bucket_cap_mb, bucket_cap_mb_list)))
        elif bucket_cap_mb is not None or bucket_cap_mb_list is not None:
            raise ValueError("plan already says what is in each bucket; leave bucket_cap_mb and bucket_cap_mb_list out")
        positions_in(plan, schema)
        self.plan = plan
        self.names = tuple(spec.name for spec in schema.specs)

    def find(self, tree: Any) -> "PlannedLeaves":
        """Returns the leaves of a pytree of params or gradients.

        Raises:
            PlanError: names, shapes or dtypes differ from the plan.
        """
        leaves, treedef = jax.tree.flatten(tree)
        return PlannedLeaves(leaves, treedef, positions_in(self.plan, self._schema(tree)))

    def _schema(self, tree: Any) -> Schema:
        schema = schema_of(tree)
        return without(schema, self._frozen) if self._frozen else schema


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
        filled = list(leaves)
        for position, value in zip(self.positions, values, strict=True):
            filled[position] = value
        return jax.tree.unflatten(self.treedef, filled)


@functools.lru_cache(maxsize=CACHE_SIZE)
def plan_of(schema: Schema, caps: tuple[int, ...]) -> BucketPlan:
    """Returns the buckets of a schema, last leaves first; the same object for the same schema and caps (in bytes)."""
    return plan_in_ready_order(schema.specs, caps)


@functools.lru_cache(maxsize=CACHE_SIZE)
def positions_in(plan: BucketPlan, schema: Schema) -> tuple[int, ...]:
    """Returns, for each parameter of the plan, the position of its leaf in trees of this schema.

    Raises:
        PlanError: names, shapes or dtypes differ; the first difference is named.
    """
    planned = {spec.name: spec for spec in plan.params}
    for spec in schema.specs:
        _require_same(spec, planned.get(spec.name))
    leaf_of = {spec.name: leaf for spec, leaf in zip(schema.specs, schema.leaves, strict=True)}
    for name in planned:
        if name not in leaf_of:
            dtype = schema.skipped.get(name)
            have = f"holds it as {dtype}, which has no gradient" if dtype else "has no such leaf"
            raise PlanError(
                f"the plan has the parameter '{name}', but the pytree {have}; "
                "give a pytree with the names of the plan, or plan again from this pytree"
            )
    return tuple(leaf_of[spec.name] for spec in plan.params)


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
