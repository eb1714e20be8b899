"""Wrong use is a named error at trace time, never a factor of n."""

from typing import Any

import jax.numpy as jnp
import pytest
from jax_cases import Replicas, loss_fn, make_batch, make_params

from unified_ddp.jax import DistributedDataParallel

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("argnums", [0, (0, 1)])
def test_params_by_keyword(argnums: Any) -> None:
    ddp = DistributedDataParallel(make_params())
    with pytest.raises(TypeError, match=r"params are argument [01] .*but 0 positional arguments were given"):
        Replicas("vmap", 2)(lambda p, b: ddp.grad(loss_fn, argnums)(params=p, batch=b), make_params(), make_batch())


def test_has_aux_without_a_pair() -> None:
    params, batch = make_params(), make_batch()
    ddp = DistributedDataParallel(params)
    with pytest.raises(TypeError, match=r"pair \(loss, aux\)"):
        Replicas("vmap", 2)(lambda p, b: ddp.value_and_grad(loss_fn, has_aux=True)(p, b)[1], params, batch)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"axis_name": ()}, ValueError, "one or more different names"),
        ({"axis_name": ("a", "a")}, ValueError, "one or more different names"),
        ({"axis_name": (1,)}, TypeError, "axis_name takes a string"),
        ({"strategy": "packed"}, ValueError, "strategy takes 'flat', 'tuple' or None, not 'packed'"),
        ({"bucket_cap_mb": 0}, ValueError, "bucket_cap_mb"),
        ({"bucket_cap_mb_list": []}, ValueError, "bucket_cap_mb_list"),
        (
            {"plan": DistributedDataParallel({"w": jnp.ones(2)}).plan, "bucket_cap_mb": 1},
            ValueError,
            "leave bucket_cap",
        ),
    ],
)
def test_wrong_options(options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        DistributedDataParallel({"w": jnp.ones(2)}, **options)
