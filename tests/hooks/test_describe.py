"""What a hook is, in words: different for different hooks, the same in all processes."""

import dataclasses
import enum
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unified_ddp.hooks import AllReduce, Compressed, Noop, PowerSGD, Quantize8, SharedHook, TopK
from unified_ddp.hooks.describe import describe


class Kind(enum.Enum):
    FAST = 1
    EXACT = 2


class State:
    def __init__(self, rate: Any = 0.5, rank: int = 0) -> None:
        self.rate = rate
        self.rank = rank
        self.group = object()
        self.seen = [rate, rank]
        self._step = rank


@dataclasses.dataclass
class Options:
    kind: Kind = Kind.FAST
    inner: Any = None
    device: int = 0


class Wrapping(SharedHook):
    """A hook that is no dataclass."""

    def __init__(self, inner: SharedHook, rank: int = 1, names: Any = ()) -> None:
        self.inner, self.rank, self.names = inner, rank, names

    def __call__(self, state: Any, bucket: Any, /) -> Any:
        return (yield from self.inner(state, bucket))


class Scaling:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, state: Any, bucket: Any) -> None: ...

    def method(self, state: Any, bucket: Any) -> None: ...


def plain(state: Any, bucket: Any) -> None: ...


def other(state: Any, bucket: Any) -> None: ...


def scaled(scale: Any, inner: Any = None, rank: int = 0) -> Callable:
    def hook(state: Any, bucket: Any) -> Any:
        return scale, inner, rank, again

    again = hook
    return hook


DIFFERENT: list[Any] = [
    (Noop(),),
    (AllReduce(),),
    (Compressed(AllReduce(), "float16"),),
    (Compressed(AllReduce(), "bfloat16"),),
    (Compressed(PowerSGD(), "bfloat16"),),
    (Compressed(PowerSGD(seed=1), "bfloat16"),),
    (PowerSGD(),),
    (PowerSGD(rank=2),),
    (TopK(),),
    (Quantize8(error_feedback=False),),
    (Wrapping(TopK()),),
    (Wrapping(TopK(0.5)),),
    (Wrapping(TopK(), rank=2),),
    (Wrapping(TopK(), names=["a", {"b": None}]),),
    (plain,),
    (other,),
    (scaled,),
    (print,),
    (scaled(1),),
    (scaled(2),),
    (scaled(1, plain),),
    (scaled((1, Kind.EXACT)),),
    (functools.partial(plain),),
    (functools.partial(plain, 1),),
    (functools.partial(plain, bucket=1),),
    (functools.partial(scaled(1), 1),),
    (Scaling(1.0),),
    (Scaling(2.0),),
    (Scaling(1.0).method,),
    (Scaling(2.0).method,),
    (plain, State()),
    (plain, State(0.25)),
    (plain, State(None)),
    (plain, Options()),
    (plain, Options(Kind.EXACT)),
    (plain, Options(inner=PowerSGD(seed=1))),
    (plain, 1),
    (plain, "1"),
    (plain, {"a": {1, 2}}),
]


def test_different_hooks_are_told_apart() -> None:
    told = [describe(*hook) for hook in DIFFERENT]
    assert len(set(told)) == len(told)
    assert not [text for text in told if " at 0x" in str(text)]


def test_no_hook() -> None:
    assert describe(None) is None


@pytest.mark.parametrize(
    ("hook", "text"),
    [
        ((Compressed(TopK(0.1), "float16"),), "Compressed(inner=TopK(error_feedback=True, start_step=0, ratio=0.1), "),
        ((plain, State()), f"{__name__}.plain with State(rate=0.5)"),
        ((scaled(1, plain),), f"{__name__}.scaled.<locals>.hook(again=..., inner={__name__}.plain, scale=1)"),
        ((functools.partial(plain, 3, bucket=None),), f"partial(func={__name__}.plain, 0=3, bucket=None)"),
        ((Scaling(1.0).method,), "Scaling(scale=1.0).method"),
        ((plain, Options(Kind.EXACT, Noop())), f"{__name__}.plain with Options(kind=Kind.EXACT, inner=Noop())"),
    ],
    ids=lambda value: value[:9] if isinstance(value, str) else "",
)
def test_words(hook: Any, text: str) -> None:
    assert str(describe(*hook)).startswith(text)


@pytest.mark.parametrize(
    ("one", "another"),
    [
        ((plain, State(rank=0)), (plain, State(rank=1))),
        ((scaled(1, rank=0),), (scaled(1, rank=1),)),
        ((plain, Options(device=0)), (plain, Options(device=1))),
        ((scaled(object()),), (scaled(object()),)),
        ((functools.partial(plain, object()),), (functools.partial(plain, object()),)),
    ],
    ids=["state", "closure", "dataclass", "objects closed over", "objects bound"],
)
def test_what_a_rank_has_of_its_own_is_left_out(one: Any, another: Any) -> None:
    assert describe(*one) == describe(*another)


def test_a_variable_without_a_value() -> None:
    def hook() -> Any:
        return later

    before = describe(hook)
    later = 1
    assert before != describe(hook) == f"{before}(later={later})"


def test_all_processes_use_the_same_words() -> None:
    """Two processes with other hashes, and other addresses."""

    def run(seed: str) -> str:
        command = [sys.executable, str(Path(__file__))]
        done = subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("1") == run("2")


if __name__ == "__main__":
    print([describe(*hook) for hook in DIFFERENT])
