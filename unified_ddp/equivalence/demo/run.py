"""One verification from start to end: starts the children, feeds them, compares what comes back."""

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from unified_ddp.equivalence.demo.children import Children
from unified_ddp.equivalence.demo.config import Side, VerifyConfig, VerifyError
from unified_ddp.equivalence.demo.data import initial_weights, make_shards
from unified_ddp.equivalence.demo.exchange import Exchange, StepRecord
from unified_ddp.equivalence.demo.verdict import Finding, Judge, VerifyReport
from unified_ddp.plan import BucketPlan, schema_fingerprint

_POLL_SECONDS = 0.01

Progress = Callable[[str, int], None]
T = TypeVar("T")


def run_verify(config: VerifyConfig, progress: Progress = lambda phase, steps: None) -> VerifyReport:
    """Trains both sides and compares them.

    Args:
        config: what to run.
        progress: is told what is going on and how many steps are compared.

    Raises:
        VerifyError: the run could not be carried out: a process died or hung, something is not installed, or the
            bucket to be broken does not exist. Every child has ended when it is raised.
    """
    with tempfile.TemporaryDirectory(prefix="unified-ddp-verify-") as directory:
        exchange = Exchange(Path(directory))
        exchange.put_job(config)
        progress("starting", 0)
        with Children(exchange, config) as children:
            return _Run(config, exchange, children, progress).report()


class _Run:
    def __init__(self, config: VerifyConfig, exchange: Exchange, children: Children, progress: Progress) -> None:
        self.config, self.exchange, self.children, self.progress = config, exchange, children, progress
        self.ranks = [(side, rank) for side in Side for rank in range(config.world_size)]

    def report(self) -> VerifyReport:
        self.exchange.put_inputs(make_shards(self.config), initial_weights(self.config))
        plans = self._plans()
        plan = plans[Side.TORCH, 0]
        judge = Judge(self.config, plan)
        for step in range(self.config.steps):
            self.progress("training", step)
            judge.add(step, self._records(step))
        self.progress("done", self.config.steps)
        fingerprints = {f"{side} rank {rank}": p.fingerprint for (side, rank), p in plans.items()}
        return VerifyReport(
            config=self.config,
            plan=plan,
            fingerprints=fingerprints,
            schema_fingerprint=schema_fingerprint(list(plan.params)),
            versions={**self.exchange.versions(Side.TORCH), **self.exchange.versions(Side.JAX)},
            comparisons=judge.comparisons,
            buffers=judge.buffers,
            losses=judge.losses,
            findings=(*_plan_findings(fingerprints), *judge.result()),
        )

    def _plans(self) -> dict[tuple[Side, int], BucketPlan]:
        self.progress("planning", 0)
        plans = {}
        for side, rank in self.ranks:
            plans[side, rank] = self._wait(side, rank, "its bucket plan", partial(self.exchange.plan, side, rank))
            self._require_bucket(plans[side, rank])
        return plans

    def _require_bucket(self, plan: BucketPlan) -> None:
        fault, count = self.config.inject, len(plan.buckets)
        if fault and fault.breaks_reduction and self.config.bucket_at_fault >= count:
            raise VerifyError(
                f"--inject-bucket {self.config.bucket_at_fault}: the plan has "
                f"{'only bucket 0' if count == 1 else f'the buckets 0 to {count - 1}'}; give one of them, or a smaller "
                "--bucket-cap-mb for more buckets"
            )

    def _records(self, step: int) -> dict[Side, list[StepRecord]]:
        records: dict[Side, list[StepRecord]] = {side: [] for side in Side}
        for side, rank in self.ranks:
            what = f"step {step} of {self.config.steps}"
            take = partial(self.exchange.take_step, side, rank, step)
            records[side].append(self._wait(side, rank, what, take))
        return records

    def _wait(self, side: Side, rank: int, what: str, take: Callable[[], T | None]) -> T:
        deadline = time.monotonic() + self.config.timeout
        while (found := take()) is None:
            self.children.check()
            if time.monotonic() > deadline:
                raise VerifyError(
                    f"{self.children.name(side, rank)} did not report {what}: no progress for {self.config.timeout:g} "
                    "seconds. A process hangs, or the machine is slow and needs a longer --timeout. "
                    f"Where each process is:\n{self.children.where()}"
                )
            time.sleep(_POLL_SECONDS)
        return found


def _plan_findings(fingerprints: dict[str, int]) -> list[Finding]:
    expected = next(iter(fingerprints.values()))
    wrong = [f"{name}: {value:016x}" for name, value in fingerprints.items() if value != expected]
    if not wrong:
        return []
    return [Finding("plan", None, (), 0, (), f"plans differ from torch rank 0's {expected:016x}: {', '.join(wrong)}")]
