"""What goes into a step: of a process, and cut into microbatches."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unified_ddp.jax.step.state import StepInputs

GIVEN = StepInputs({"x": jnp.arange(12.0).reshape(6, 2), "n": jnp.int32(7)}, jnp.arange(6.0), None, None, ())


@pytest.mark.parametrize("key", [jax.random.key(3), jax.random.PRNGKey(3)], ids=["typed", "raw"])
def test_microbatches(key: jax.Array) -> None:
    parts = dataclasses.replace(GIVEN, rng=key, static=(("train", True),)).of_microbatches(3)
    assert parts.static == (("train", True),)
    for number in range(3):
        part = jax.tree.map(lambda leaf, i=number: leaf[i], parts)
        rows = slice(2 * number, 2 * number + 2)
        assert np.array_equal(part.batch["x"], GIVEN.batch["x"][rows])
        assert np.array_equal(part.weight, GIVEN.weight[rows])
        assert part.batch["n"] == 7
        assert jnp.array_equal(part.rng, jax.random.fold_in(key, number))


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({}, "(batch.n: [] int32, batch.x: [6, 2] float32, weight: [6] float32)"),
        ({"batch": {"x": np.ones((6, 2), np.int32)}}, "(batch.x: [6, 2] int32, weight: [6] float32)"),
        ({"weight": None}, "(batch.n: [] int32, batch.x: [6, 2] float32)"),
        ({"rng": jax.random.key(0)}, "(batch.n: [] int32, batch.x: [6, 2] float32, weight: [6] float32, rng)"),
        (
            {"static": (("fn", {1}), ("train", True))},
            "(batch.n: [] int32, batch.x: [6, 2] float32, weight: [6] float32, fn: set, train=True)",
        ),
    ],
)
def test_what_differs_is_told(other: dict[str, Any], text: str) -> None:
    inputs = dataclasses.replace(GIVEN, **other)
    assert inputs.text() == text
    assert (inputs.fingerprint() == GIVEN.fingerprint()) == (not other)
