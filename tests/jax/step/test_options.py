"""Options of a step: those that it cannot have, and those that processes compare."""

from typing import Any

import jax.numpy as jnp
import optax
import pytest
from jax_cases import loss_fn, make_params, mesh

from unified_ddp.errors import AxisError
from unified_ddp.jax import DistributedDataParallel
from unified_ddp.jax.step.options import StepOptions

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"reduction": "sum"}, ValueError, "reduction takes 'weighted_mean', 'mean', not 'sum'"),
        ({"buffer_sync": "sum"}, ValueError, "buffer_sync takes"),
        ({"on_nonfinite": "stop"}, ValueError, "on_nonfinite takes"),
        ({"accumulate": 0}, ValueError, "accumulate takes a number of microbatches, 1 or more, not 0"),
        ({"compute_dtype": jnp.int8}, ValueError, "compute_dtype takes a floating-point type"),
        ({"donate": True, "on_nonfinite": "raise"}, ValueError, "gives the old state away"),
        ({"mesh": mesh(2, "batch")}, AxisError, "the mesh has no axis 'data', only 'batch'"),
    ],
)
def test_wrong_options(options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        DistributedDataParallel(make_params()).train_step(loss_fn, optax.sgd(0.1), **options)


def test_each_process_waits_and_donates_as_it_likes() -> None:
    options = StepOptions(True, 2, "mean", False, None, "mean", "skip", donate=True, max_in_flight=3, timeout=None)
    assert options.compared() == {
        "has_aux": True,
        "accumulate": 2,
        "reduction": "mean",
        "divide_by_initial_world_size": False,
        "compute_dtype": None,
        "buffer_sync": "mean",
        "on_nonfinite": "skip",
    }
