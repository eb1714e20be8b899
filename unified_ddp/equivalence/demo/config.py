"""What one verification is asked to do. Goes to the child processes as JSON."""

import json
import math
from dataclasses import asdict, dataclass
from enum import StrEnum

from unified_ddp.equivalence.compare import default_tolerance
from unified_ddp.errors import UnifiedDDPError


class VerifyError(UnifiedDDPError, RuntimeError):
    """The verification could not run, so it says nothing about the gradients."""


class Side(StrEnum):
    """One framework's half of the run."""

    TORCH = "torch"
    JAX = "jax"


class Dtype(StrEnum):
    """Of parameters, inputs and gradients."""

    FLOAT32 = "float32"
    FLOAT64 = "float64"


class Fault(StrEnum):
    """A deliberate fault. The first three break one bucket's reduction; the last two a process."""

    SKIP_BUCKET = "skip-bucket"
    SUM = "sum"
    STALE_RANK = "stale-rank"
    DIE = "die"
    HANG = "hang"

    @property
    def breaks_reduction(self) -> bool:
        """Says whether gradients come out wrong, rather than not at all."""
        return self not in (Fault.DIE, Fault.HANG)


@dataclass(frozen=True)
class VerifyConfig:
    """Options of one verification; `unified-ddp verify --help` describes them.

    Raises:
        VerifyError: a value is out of range.
    """

    world_size: int = 2
    steps: int = 20
    dtype: Dtype = Dtype.FLOAT32
    tolerance: float | None = None
    batch_size: int = 32
    bucket_cap_mb: float = 0.001
    learning_rate: float = 0.05
    seed: int = 0
    timeout: float = 180.0
    inject: Fault | None = None
    inject_into: Side | None = None
    inject_bucket: int | None = None
    inject_rank: int | None = None

    def __post_init__(self) -> None:
        _require(self.world_size >= 1, "--world-size", self.world_size, "give at least 1")
        _require(self.steps >= 1, "--steps", self.steps, "give at least 1")
        _require(
            self.batch_size >= 2, "--batch-size", self.batch_size, "batch norm needs at least 2 images on each rank"
        )
        _require(
            0 < self.bucket_cap_mb < math.inf, "--bucket-cap-mb", self.bucket_cap_mb, "give a positive number of MiB"
        )
        _require(0 < self.timeout < math.inf, "--timeout", self.timeout, "give a positive number of seconds")
        _require(0 < self.learning_rate < math.inf, "--learning-rate", self.learning_rate, "give a positive number")
        _require(self.seed >= 0, "--seed", self.seed, "give 0 or more")
        _require(0 < self.k < math.inf, "--tolerance", self.tolerance, "give a positive number, or leave it out")
        if self.inject is None:
            for option in ("inject_into", "inject_bucket", "inject_rank"):
                value = getattr(self, option)
                _require(value is None, f"--{option.replace('_', '-')}", value, "give --inject, too, or leave it out")
            return
        _require(self.bucket_at_fault >= 0, "--inject-bucket", self.inject_bucket, "buckets count from 0")
        last = self.world_size - 1
        _require(0 <= self.rank_at_fault <= last, "--inject-rank", self.inject_rank, f"ranks are 0 to {last}")
        if self.inject.breaks_reduction:
            _require(
                self.world_size >= 2, "--world-size", 1, "one rank alone has no reduction that a fault could break"
            )
        if self.inject is Fault.STALE_RANK:
            _require(self.steps >= 2, "--steps", self.steps, "a stale gradient needs a step before")

    @property
    def k(self) -> float:
        """The tolerance: a tensor's largest absolute difference may be k times its largest |reference|."""
        return default_tolerance(self.dtype) if self.tolerance is None else self.tolerance

    @property
    def bucket_at_fault(self) -> int:
        """The bucket that a fault of one bucket breaks; the second one by default."""
        return 1 if self.inject_bucket is None else self.inject_bucket

    @property
    def rank_at_fault(self) -> int:
        """The rank that a fault of one rank strikes; the last one by default."""
        return self.world_size - 1 if self.inject_rank is None else self.inject_rank

    def fault_in(self, side: Side) -> Fault | None:
        """Returns the fault to be injected into a side; it is torch's by default."""
        return self.inject if (self.inject_into or Side.TORCH) is side else None

    def to_json(self) -> str:
        """Returns what `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "VerifyConfig":
        """Reads what `to_json` wrote."""
        data = json.loads(text)
        data["inject"] = data["inject"] and Fault(data["inject"])
        data["inject_into"] = data["inject_into"] and Side(data["inject_into"])
        return cls(**{**data, "dtype": Dtype(data["dtype"])})


def _require(holds: bool, option: str, value: object, remedy: str) -> None:
    if not holds:
        raise VerifyError(f"{option} {value}: {remedy}")
