"""Which parameters are trained."""

from typing import Any

import pytest
from jax_cases import make_params

from unified_ddp.errors import PlanError
from unified_ddp.jax import DistributedDataParallel
from unified_ddp.jax.pytrees.trainable import frozen_names

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(
    ("trainable", "error", "message"),
    [
        ({"dense": True}, ValueError, "structure does not fit params"),
        (lambda name: 1, TypeError, "returned 1 for"),
        ("scale", TypeError, "trainable takes a pytree of bools or a function of a name, not 'scale'"),
    ],
)
def test_wrong_filters(trainable: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        DistributedDataParallel(make_params(), trainable=trainable)


@pytest.mark.parametrize(
    ("trainable", "frozen"),
    [
        (None, set()),
        (lambda name: name.startswith("dense"), {"head.kernel", "scale", "empty", "unused"}),
        (dict.fromkeys(make_params(), True) | {"dense1": False}, {"dense1.kernel", "dense1.bias"}),
    ],
)
def test_names_of_frozen_parameters(trainable: Any, frozen: set[str]) -> None:
    assert frozen_names(make_params(), trainable) == frozen


def test_something_must_be_trained() -> None:
    with pytest.raises(PlanError, match="params has no leaf that can have a gradient and is not frozen; give"):
        DistributedDataParallel(make_params(), trainable=lambda name: False)
