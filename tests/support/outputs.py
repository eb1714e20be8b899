"""Kinds of objects that a module may return: how to make one of a tensor, and how to get a tensor out of it."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


@dataclasses.dataclass
class Data:
    value: torch.Tensor
    note: str = "a note"


class Named(NamedTuple):
    value: torch.Tensor
    other: torch.Tensor


class Dict(dict):
    pass


class User:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


OUTPUTS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "dataclass": (Data, lambda out: out.value),
    "namedtuple": (lambda t: Named(t, t * 2), lambda out: out.value + out.other),
    "dict subclass": (lambda t: Dict(a=t), lambda out: out["a"]),
    "OrderedDict": (lambda t: collections.OrderedDict(a=t, b=[t]), lambda out: out["a"] + out["b"][0]),
    "user class": (User, lambda out: out.value),
    "nested": (lambda t: ({"a": [t, None, 3, "text"]}, (t,)), lambda out: out[0]["a"][0] + out[1][0]),
    "generator": (lambda t: (x for x in [t]), lambda out: next(out)),
}
