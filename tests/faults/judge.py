"""Runs a row on real ranks and judges what came of it."""

import os
import warnings
from dataclasses import dataclass

from support.world import RankResult, World

from faults.table import Row, load

__all__ = ["Outcome", "judge"]


@dataclass(frozen=True)
class Outcome:
    right: bool
    text: str


def run_case(rank: int, world_size: int, name: str, torchs: bool) -> tuple[str, str]:
    """On a rank: runs one row and tells how it ended."""
    import torch
    from torch.nn.parallel import DistributedDataParallel as TorchDDP

    from unified_ddp.torch import DistributedDataParallel

    row = load()[name]
    torch.manual_seed(100 + rank)
    before = dict(os.environ)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            row.case(TorchDDP if torchs else DistributedDataParallel, rank, world_size, **row.options)  # type: ignore[call-arg]
    except AssertionError as error:
        return "wrong", f"{error}" or repr(error)
    except Exception as error:
        return "error", f"{type(error).__name__}: {error}"
    finally:
        os.environ.clear()
        os.environ.update(before)
    return "right", ""


def judge(row: Row, world: World, *, torchs: bool = False) -> Outcome:
    """Runs a row on the ranks of `world`, which is ended if they may be of no more use."""
    results = world.collect(run_case, timeout=row.timeout, name=row.name, torchs=torchs)
    said = [_judge_rank(row, rank, result) for rank, result in enumerate(results)]
    outcome = Outcome(
        all(o.right for o in said), "; ".join(f"rank {r}: {o.text}" for r, o in enumerate(said) if o.text)
    )
    if row.kills or not outcome.right:
        world.stop()
    return outcome


def _judge_rank(row: Row, rank: int, result: RankResult) -> Outcome:
    if row.errors and rank not in row.errors:
        return Outcome(True, "")
    if result.error is not None:
        return Outcome(False, "hangs" if result.error_type == "TimeoutError" else f"dies: {result.error}")
    how, text = result.value
    if how == "wrong":
        return Outcome(False, f"silently wrong: {text}")
    if not row.errors:
        return Outcome(how == "right", text)
    if how == "right":
        return Outcome(False, "no error")
    missing = [word for word in row.errors[rank] if word not in text]
    return Outcome(not missing, text if not missing else f"its error does not say {missing}: {text}")
