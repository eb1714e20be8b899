"""Tensors in the words of the core."""

import warnings
from typing import Any

import pytest
import torch

from unified_ddp import ParamSpec
from unified_ddp.torch.schema import compared_specs


def quantized() -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):
        return torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8)


@pytest.mark.parametrize(
    ("tensor", "name", "fields"),
    [
        (torch.zeros(2, 3).t(), "t", {"shape": (3, 2), "dtype": "float32", "strides": (1, 3), "trainable": False}),
        (torch.zeros(2, dtype=torch.bool), "t", {"dtype": "bool"}),
        (torch.zeros(2, dtype=torch.complex64), "t", {"dtype": "complex64"}),
        (torch.zeros(2, requires_grad=True), "t", {"trainable": True}),
        (torch.eye(2).to_sparse(), "t (torch.sparse_coo)", {"shape": (2, 2), "dtype": "float32"}),
        (torch.zeros(2, dtype=torch.uint8).view(torch.bits8), "t (bits8)", {"shape": (2,)}),
        (quantized(), "t (qint8)", {"strides": (1,)}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tensors_that_ranks_compare(tensor: torch.Tensor, name: str, fields: dict[str, Any]) -> None:
    (spec,) = compared_specs([("ignored", torch.zeros(1)), ("t", tensor)], {"ignored"})
    assert isinstance(spec, ParamSpec)
    assert spec.name == name
    assert {field: getattr(spec, field) for field in fields} == fields
