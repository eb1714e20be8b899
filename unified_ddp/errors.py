"""Named errors. Each message says what is wrong, where (parameter names, ranks), and what to do.

Each also is the built-in error that users of either framework would catch (ValueError, RuntimeError).
"""

from unified_ddp._core import PlanError, ReadinessError, UnifiedDDPError

__all__ = [
    "AxisError",
    "CommHookError",
    "ConstructionMismatchError",
    "MisuseError",
    "NonFiniteError",
    "OutOfStepError",
    "PlanError",
    "ReadinessError",
    "ReductionError",
    "ReplicaMismatchError",
    "StallError",
    "UnevenDataError",
    "UnifiedDDPError",
    "UnusedParameterError",
]


for _native in (UnifiedDDPError, PlanError, ReadinessError):
    _native.__module__ = __name__  # as users import it, and pickle with them


class ConstructionMismatchError(UnifiedDDPError, RuntimeError):
    """Ranks were constructed with different parameters, buffers or options. Raised on every rank."""


class UnusedParameterError(UnifiedDDPError, RuntimeError):
    """Parameters took no part in a synchronising backward pass and nothing said that they might not."""


class MisuseError(UnifiedDDPError, RuntimeError):
    """A call that the state, or the way of construction, does not allow. Nothing was done and nothing is lost."""


class ReductionError(UnifiedDDPError, RuntimeError):
    """A reduction failed, or gradients were lost as a backward pass was left before its reduction ended."""


class CommHookError(UnifiedDDPError, RuntimeError, TypeError, ValueError):
    """A comm hook gave back what no bucket can be made of. Raised on the ranks whose hook did."""


class OutOfStepError(ReductionError):
    """Ranks were about to do different things together. Raised on every rank, before anything was communicated."""


class ReplicaMismatchError(UnifiedDDPError, RuntimeError):
    """Parameters or buffers that should be equal on all ranks are not. Raised on every rank."""


class AxisError(UnifiedDDPError, ValueError):
    """A JAX reduction was asked for outside the mapped axis that it needs."""


class NonFiniteError(UnifiedDDPError, FloatingPointError):
    """Gradients are not finite, and the step was told to raise then. Raised in every process."""


class UnevenDataError(UnifiedDDPError, ValueError):
    """A batch cannot be shared evenly by the replicas, or processes gave batches or arguments that differ."""


class StallError(UnifiedDDPError, TimeoutError):
    """A step, or a check across processes, did not end in time; names the processes that did not come."""
