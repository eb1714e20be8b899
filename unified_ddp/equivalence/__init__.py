"""Comparison of one model in two programs: outputs, loss, gradients, reduced gradients, update, curve.

    from unified_ddp.equivalence import JaxSide, Pair, TorchSide

    pair = Pair(TorchSide(model, torch_loss), JaxSide(params, jax_loss), batches)
    report = pair.check(until="gradients")
    report.assert_ok()

Architecture, and which way imports go:

    errors, results     what was found; plain data, for JSON and for every way of rendering
    side                the protocol of a side: functions from numpy arrays to numpy arrays
    batches             trees of arrays as batches: layout, permutation, shards
    mapping/            which tensor of one side makes which of the other, by linear maps
    noise, tolerance    how much rounding moves each side, and what difference that allows
    observe             what a side computes, in coordinates that both sides share
    judge               one verdict a tensor: pass, zero within rounding, precision, differs
    rungs, reduced, training   outputs to gradients; after the reduction; update, steps and curve
    scramble, power     weights that test something, and what was not tested all the same
    spawn               ranks in processes of their own
    ladder, pair        the rungs one after the other; Pair, the way in
    gradients           check_gradients: a distributed step that is not ours
    explain             a report as plain text
    compare, demo/      the self-test `unified-ddp verify`

This package imports neither framework. The sides are `unified_ddp.torch.equivalence.TorchSide` and
`unified_ddp.jax.equivalence.JaxSide`, loaded here only when they are asked for by name. The first side of a pair gives
coordinates and names; a tensor of the second side is carried over by the mapping before it is compared.
"""

import importlib
from typing import Any

from unified_ddp.equivalence.errors import EquivalenceError, MappingError, NotEquivalentError
from unified_ddp.equivalence.reporting import Report
from unified_ddp.equivalence.results import RUNGS, Finding, Measure, NotTested, Rung, SideInfo, Verdict
from unified_ddp.equivalence.side import Evaluation, Reduction, Side, TensorInfo, Trajectory

__all__ = [
    "RUNGS",
    "EquivalenceError",
    "Evaluation",
    "Finding",
    "JaxSide",
    "MappingError",
    "Measure",
    "NotEquivalentError",
    "NotTested",
    "Pair",
    "Reduction",
    "Report",
    "Rung",
    "Side",
    "SideInfo",
    "TensorInfo",
    "TorchSide",
    "Trajectory",
    "Verdict",
    "check_gradients",
]

_LAZY = {
    "Pair": "unified_ddp.equivalence.pair",
    "check_gradients": "unified_ddp.equivalence.gradients",
    "TorchSide": "unified_ddp.torch.equivalence.side",
    "JaxSide": "unified_ddp.jax.equivalence.side",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
