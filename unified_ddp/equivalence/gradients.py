"""One framework, many devices: gradients of a step that is not ours, beside plain gradients on one device."""

import time
from collections.abc import Callable
from typing import Any

from unified_ddp.equivalence.batches import shards
from unified_ddp.equivalence.errors import EquivalenceError
from unified_ddp.equivalence.mapping.mapping import Mapping, Source
from unified_ddp.equivalence.noise import in_dtype
from unified_ddp.equivalence.observe import Observer
from unified_ddp.equivalence.reduced import own_oracle
from unified_ddp.equivalence.reporting import Report
from unified_ddp.equivalence.results import Rung
from unified_ddp.equivalence.scramble import scrambled
from unified_ddp.equivalence.side import SteppedSide


def check_gradients(
    side: SteppedSide,
    batch: Any,
    *,
    ranks: int = 2,
    step: Callable[..., Any] | None = None,
    dtype: str = "float32",
    weights: str = "scrambled",
    seed: int = 0,
) -> Report:
    """Compares the gradients of a distributed step with the mean over shards of plain gradients on one device.

    torch: `side` is `TorchSide(model, loss, ddp=wrap)`, where `wrap(module)` is called on every rank and returns
    torch's DistributedDataParallel, FSDP2's `fully_shard(module)` or any other wrapper that keeps parameters in
    `module`. `step`, if given, is called as step(wrapped, batch) and runs forward and backward in the wrapper's own
    way.

    JAX: `side` is `JaxSide(params, loss_fn)`, plain and on one device, and `step(params, batch)` is the user's own jit,
    shard_map or pmap: it takes the parameters as `side` got them and the whole batch, shards both as it likes on
    whatever devices there are, and returns gradients of the structure of the parameters.

    Args:
        side: the plain model and loss.
        batch: all ranks' rows, a tree of numpy arrays; rank r takes the r-th share.
        ranks: number of shards; with 1 the oracle is the plain gradient of the whole batch.
        step: see above; torch may leave it out.
        dtype: of the run.
        weights: "scrambled", or "as they are".
        seed: of scrambled weights and of the jitter by which noise is learnt.

    Returns:
        A report with the one rung "reduced".

    Raises:
        EquivalenceError: a JAX side without `step`, rows that the ranks cannot share, or a failed rank.
    """
    began = time.monotonic()
    if side.framework == "jax" and step is None:
        raise EquivalenceError(
            "check_gradients of a JAX side needs step=: a function (params, batch) that returns gradients"
        )
    tensors = side.tensors()
    values = side.values()
    if weights == "scrambled":
        values = scrambled(values, tensors, seed)
    values = {name: in_dtype(array, "float64") for name, array in values.items()}
    mapping = Mapping({t.name: (Source(t.name),) for t in tensors}, {})
    observer = Observer(side, True, mapping, {t.name: t.shape for t in tensors}, None)
    parts = shards(batch, ranks)
    reduction = side.reduce_by(step, values, batch, parts, dtype)
    at = observer.observe(values, parts[0], dtype)
    noise, note = observer.noise(values, parts[0], dtype, at, seed)
    findings = own_oracle(observer, reduction, noise, dtype)
    return Report(
        rungs=(Rung("reduced", tuple(findings), time.monotonic() - began),),
        sides=(side.info(), side.info()),
        dtype=dtype,
        until="reduced",
        ranks=ranks,
        steps=0,
        seed=seed,
        weights=weights,
        mapping={name: name for name in mapping.sources},
        notes=(note,) if note else (),
        seconds=time.monotonic() - began,
    )
