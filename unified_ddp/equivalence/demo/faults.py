"""The faults that strike a process. Those that break a reduction are in torch_fault.py and jax_fault.py."""

import os
import sys
import time

from unified_ddp.equivalence.demo.config import Fault, Side, VerifyConfig

__all__ = ["DIE_STATUS", "break_process"]

DIE_STATUS = 86


def break_process(config: VerifyConfig, side: Side, rank: int, step: int) -> None:
    """Ends or stops this process at step 1 (or the only one) if that is the fault to be injected here."""
    fault = config.fault_in(side)
    if fault is None or fault.breaks_reduction or rank != config.rank_at_fault or step != min(1, config.steps - 1):
        return
    print(f"injected fault: {side} rank {rank} will {fault} at step {step}", file=sys.stderr, flush=True)
    if fault is Fault.DIE:
        os._exit(DIE_STATUS)
    while True:
        time.sleep(3600)
