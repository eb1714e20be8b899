"""One distributed-data-parallel layer for PyTorch and JAX: the framework-neutral core.

The adapters are `unified_ddp.torch` and `unified_ddp.jax`; importing this package loads neither framework.
"""

from unified_ddp.errors import (
    AxisError,
    CommHookError,
    ConstructionMismatchError,
    MisuseError,
    NonFiniteError,
    OutOfStepError,
    PlanError,
    ReadinessError,
    ReductionError,
    ReplicaMismatchError,
    StallError,
    UnevenDataError,
    UnifiedDDPError,
    UnusedParameterError,
)
from unified_ddp.plan import (
    BucketPlan,
    BucketSpec,
    ParamSpec,
    bucket_caps,
    plan_from_json,
    plan_in_ready_order,
    plan_to_json,
    schema_fingerprint,
)

__all__ = [
    "AxisError",
    "BucketPlan",
    "BucketSpec",
    "CommHookError",
    "ConstructionMismatchError",
    "MisuseError",
    "NonFiniteError",
    "OutOfStepError",
    "ParamSpec",
    "PlanError",
    "ReadinessError",
    "ReductionError",
    "ReplicaMismatchError",
    "StallError",
    "UnevenDataError",
    "UnifiedDDPError",
    "UnusedParameterError",
    "bucket_caps",
    "plan_from_json",
    "plan_in_ready_order",
    "plan_to_json",
    "schema_fingerprint",
]
__version__ = "0.1.0"
