"""How the processes of one run exchange what they know: files in one private directory, complete as soon as visible.

Arrays are npz without pickle, everything else JSON, so that nothing a file holds is ever executed.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from unified_ddp.equivalence.demo.config import Side, VerifyConfig
from unified_ddp.equivalence.demo.data import Shards
from unified_ddp.plan import BucketPlan, plan_from_json, plan_to_json

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class StepRecord:
    """One rank's step.

    Attributes:
        loss: of the rank's own shard.
        reduced: gradients after the reduction, by parameter.
        local: what plain autograd gives on this rank, at the same weights; unreduced.
        buffers: batch-norm statistics after the step.
        plain_buffers: the same, of a plain model that was given rank 0's statistics before the step.
    """

    loss: float
    reduced: Arrays
    local: Arrays
    buffers: Arrays
    plain_buffers: Arrays


class Exchange:
    """The directory of one run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def put_job(self, config: VerifyConfig) -> None:
        """Writes what the children start from."""
        self._put_text("job.json", config.to_json())

    def job(self) -> VerifyConfig:
        """Reads the job."""
        return VerifyConfig.from_json((self.directory / "job.json").read_text())

    def put_inputs(self, shards: Shards, weights: Mapping[str, np.ndarray]) -> None:
        """Writes the shards and initial weights."""
        self._put_arrays("inputs.npz", {"images": shards.images, "labels": shards.labels, **_prefixed("w", weights)})

    def wait_for_inputs(self) -> tuple[Shards, Arrays]:
        """Waits for the shards and initial weights."""
        arrays = self._get_arrays(self._wait_for("inputs.npz"))
        return Shards(arrays["images"], arrays["labels"]), _group("w", arrays)

    def put_plan(self, side: Side, rank: int, plan: BucketPlan) -> None:
        """Writes the plan under which a rank reduces, its fingerprint with it."""
        self._put_text(f"{side}-{rank}.plan.json", plan_to_json(plan))

    def plan(self, side: Side, rank: int) -> BucketPlan | None:
        """Reads a rank's plan if it is there."""
        path = self.directory / f"{side}-{rank}.plan.json"
        return plan_from_json(path.read_text()) if path.exists() else None

    def wait_for_plan(self, side: Side, rank: int) -> BucketPlan:
        """Waits for a rank's plan."""
        return plan_from_json(self._wait_for(f"{side}-{rank}.plan.json").read_text())

    def put_step(self, side: Side, rank: int, step: int, record: StepRecord) -> None:
        """Writes one rank's step."""
        arrays: dict[str, Any] = {"loss": np.float64(record.loss)}
        for group in _GROUPS:
            arrays.update(_prefixed(group, getattr(record, group)))
        self._put_arrays(_step_file(side, rank, step), arrays)

    def take_step(self, side: Side, rank: int, step: int) -> StepRecord | None:
        """Reads one rank's step if it is there, and removes the file: nothing reads it twice."""
        path = self.directory / _step_file(side, rank, step)
        if not path.exists():
            return None
        arrays = self._get_arrays(path)
        path.unlink()
        return StepRecord(float(arrays["loss"]), **{group: _group(group, arrays) for group in _GROUPS})

    def log(self, side: Side, rank: int) -> Path:
        """Returns where a child's output goes."""
        return self.directory / f"{side}-{rank}.log"

    def put_versions(self, side: Side, versions: Mapping[str, str]) -> None:
        """Writes the versions of a side's libraries."""
        self._put_text(f"{side}.versions.json", json.dumps(dict(versions)))

    def versions(self, side: Side) -> dict[str, str]:
        """Reads the versions of a side's libraries; empty before they are there."""
        path = self.directory / f"{side}.versions.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def _wait_for(self, name: str) -> Path:
        """Waits without an end of its own: the parent ends children that wait too long."""
        path = self.directory / name
        while not path.exists():
            time.sleep(0.01)
        return path

    def _put_text(self, name: str, text: str) -> None:
        partial = self.directory / f"{name}.{os.getpid()}.partial"
        partial.write_text(text)
        partial.replace(self.directory / name)

    def _put_arrays(self, name: str, arrays: Mapping[str, Any]) -> None:
        partial = self.directory / f"{name}.{os.getpid()}.partial"
        with partial.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
        partial.replace(self.directory / name)

    def _get_arrays(self, path: Path) -> Arrays:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}


_GROUPS = tuple(field.name for field in fields(StepRecord) if field.name != "loss")


def _step_file(side: Side, rank: int, step: int) -> str:
    return f"{side}-{rank}.step-{step}.npz"


def _prefixed(group: str, arrays: Mapping[str, np.ndarray]) -> Arrays:
    return {f"{group}/{name}": array for name, array in arrays.items()}


def _group(group: str, arrays: Mapping[str, np.ndarray]) -> Arrays:
    head = f"{group}/"
    return {name.removeprefix(head): array for name, array in arrays.items() if name.startswith(head)}
