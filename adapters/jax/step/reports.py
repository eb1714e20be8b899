"""What a step has to raise once it has ended: what differed between processes, or was not finite."""

import json
from typing import Any, NamedTuple

import jax

from unified_ddp.errors import NonFiniteError, ReplicaMismatchError, UnevenDataError
from unified_ddp.jax.step.options import StepOptions
from unified_ddp.jax.step.processes import ProcessGathering
from unified_ddp.ranks.texts import shortened, tell_sides


class Dispatched(NamedTuple):  # a pytree, so that its arrays can be waited for
    """A step under way: what the caller got, its checks, and what this process gave, in words and as checksums."""

    value: Any
    checks: dict[str, jax.Array]
    told: str
    held: dict[str, int]


class Reports:
    """Judges steps that have ended; names are asked for across processes only if there is something to say.

    `names` are those of the trained parameters, in tree order.
    """

    def __init__(self, names: tuple[str, ...], options: StepOptions) -> None:
        self._names = names
        self._timeout = options.timeout
        self._unchanged = "" if options.donate else "State is unchanged. "

    def judge(self, step: int, ended: Dispatched) -> None:
        """Raises what the step of this number has to raise, in every process.

        Raises:
            UnevenDataError: processes gave batches or arguments that differ.
            ReplicaMismatchError: processes gave states that differ.
            NonFiniteError: gradients are not finite, and parameters are to be named.
        """
        checks = ended.checks
        if "uneven" in checks and bool(checks["uneven"]):
            every = self._gather("uneven batches", ended.told)
            raise UnevenDataError(
                f"step {step}: processes gave batches or arguments that differ: {tell_sides(every, 'process')}. "
                f"{self._unchanged}Drop the remainder, or fill every process's batch up to the same number of rows "
                "with unified_ddp.jax.pad_batch; pass weight and rng in all or none, and the same static arguments."
            )
        if "apart" in checks and bool(checks["apart"]):
            raise ReplicaMismatchError(self._apart(step, ended.held | {"step": int(checks["step"])}))
        if "bad" in checks and not bool(checks["finite"]):
            raise NonFiniteError(self._nonfinite(step, checks))

    def _gather(self, what: str, text: str) -> list[str]:
        return ProcessGathering(f"the report of {what}", self._timeout).all_gather_text(text)

    def _apart(self, step: int, held: dict[str, int]) -> str:
        every = [json.loads(text) for text in self._gather("states that differ", json.dumps(held))]
        names = dict.fromkeys(name for one in every for name in ("step", *one))
        sides = {name: tell_sides([str(one.get(name, "not restored")) for one in every], "process") for name in names}
        name = next(name for name in names if sides[name])
        what = "is" if name == "step" else "was restored with checksum"
        return (
            f"step {step}: processes gave states that differ: {name} {what} {sides[name]}. {self._unchanged}Restore "
            "the same state in every process, or make a new one with init, which takes that of process 0."
        )

    def _nonfinite(self, step: int, checks: dict[str, jax.Array]) -> str:
        mine = {
            int(shard.index[0].start or 0): self._named(shard.data[0]) for shard in checks["bad"].addressable_shards
        }
        every = [json.loads(text) for text in self._gather("gradients that are not finite", json.dumps(mine))]
        bad = {int(replica): (p, names) for p, by in enumerate(every) for replica, names in by.items() if names}
        told = "; ".join(
            f"{shortened(names, 3)} on replica {replica}" + (f" (process {process})" if len(every) > 1 else "")
            for replica, (process, names) in sorted(bad.items())
        )
        if not told:
            reduced = shortened(self._named(checks["bad_mean"]), 3)
            told = f"{reduced} in the mean over replicas, though on no replica: the sum overflowed"
        return (
            f"step {step}: gradients are not finite: {told}. State is unchanged; lower the learning rate, clip "
            'gradients, look at this batch, or pass on_nonfinite="skip".'
        )

    def _named(self, bad: Any) -> list[str]:
        return [repr(name) for name, is_bad in zip(self._names, bad, strict=True) if is_bad]
