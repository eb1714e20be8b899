"""What processes compare at init: parameters, buffers and options of two of them, one after the other."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from unified_ddp.errors import ConstructionMismatchError
from unified_ddp.jax.step.construction import check_processes

MODEL: dict[str, Any] = {
    "params": {"w": jnp.ones((2, 3)), "key": jax.random.key(0), "bits": jnp.ones(2, jnp.int4)},
    "buffers": {"mean": jnp.zeros(3)},
    "optimizer_state": {"mu": jnp.zeros(3)},
    "trained": ["w"],
    "options": {"accumulate": 1},
}


class Told(Exception):
    pass


class Process:
    """Gathers its own and the texts of the processes before it."""

    def __init__(self, *before: "Process") -> None:
        self.before = before
        self.numbers: list[int] = []
        self.texts: list[str] = []

    def all_gather_ints(self, value: int) -> list[int]:
        self.numbers.append(value)
        return [p.numbers[0] for p in self.before] + [value] + ([-1] if not self.before else [])

    def all_gather_text(self, text: str) -> list[str]:
        self.texts.append(text)
        if not self.before:
            raise Told
        return [p.texts[0] for p in self.before] + [text]


def compare(one: dict[str, Any], other: dict[str, Any]) -> None:
    first = Process()
    with pytest.raises(Told):
        check_processes(first, **one)
    check_processes(Process(first), **other)


def test_equal_ones_pass() -> None:
    compare(MODEL, MODEL)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"params": MODEL["params"] | {"w": jnp.ones((3, 2))}}, r"the shape of parameter 'w' is \[2, 3\] on process 0"),
        ({"params": MODEL["params"] | {"bits": jnp.ones(2, jnp.uint4)}}, r"'bits \(int4\)' on process 0, .*uint4"),
        ({"params": MODEL["params"] | {"key": jax.random.key(0, impl="rbg")}}, r"'key \(key<fry>\)' on process 0"),
        ({"trained": []}, "the trainable of parameter 'w' is True on process 0, False on process 1"),
        ({"buffers": None}, "buffer number 0 is 'mean' on process 0, absent on process 1"),
        ({"optimizer_state": ()}, r"optimizer_state is '\(mu: \[3\]\)' on process 0, '\(\)' on process 1"),
        ({"options": {"accumulate": 2}}, "accumulate is '1' on process 0, '2' on process 1"),
    ],
)
def test_the_first_difference_is_named(other: dict[str, Any], message: str) -> None:
    with pytest.raises(ConstructionMismatchError, match=f"^processes .*{message}"):
        compare(MODEL, MODEL | other)
