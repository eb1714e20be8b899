"""Tensors in the words of the core."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from unified_ddp import ParamSpec
from unified_ddp.torch.schema import compared_specs, dtype_name, param_spec, reduced_parameters


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


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float32, "float32"), (torch.bfloat16, "bfloat16"), (torch.float8_e4m3fn, "float8_e4m3fn")],
    ids=str,
)
def test_names_of_dtypes(dtype: torch.dtype, name: str) -> None:
    assert dtype_name(dtype) == name


def test_the_schema_of_a_parameter() -> None:
    param = nn.Parameter(torch.zeros(2, 3, 4, 5, dtype=torch.float64).to(memory_format=torch.channels_last))
    spec = param_spec("conv.weight", param, sparse=True)
    assert (spec.name, spec.shape, spec.dtype) == ("conv.weight", (2, 3, 4, 5), "float64")
    assert (spec.strides, spec.device, spec.trainable, spec.sparse) == (param.stride(), "cpu", True, True)
    scalar = param_spec("scale", torch.zeros((), device="meta"))
    assert (scalar.shape, scalar.strides, scalar.device, scalar.trainable) == ((), (), "meta", False)


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.zeros(1))
        self.a = nn.Linear(2, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.b = nn.Linear(2, 2)
        self.b.weight = self.a.weight
        self.table = nn.Embedding(3, 2, sparse=True)
        self.bag = nn.EmbeddingBag(3, 2, sparse=True)
        self.dense = nn.Embedding(3, 2)


ALL = ["own", "a.weight", "a.bias", "b.bias", "table.weight", "bag.weight", "dense.weight"]


@pytest.mark.parametrize(
    ("ignored", "left_out"),
    [
        ([], []),
        (["own"], ["own"]),
        ([".own"], ["own"]),  # torch's spelling
        (["a.bias", "table.weight", "no.such"], ["a.bias", "table.weight"]),
        (["b.weight"], []),  # its first name counts
    ],
    ids=str,
)
def test_which_parameters_are_reduced(ignored: list[str], left_out: list[str]) -> None:
    module = Several()
    found = reduced_parameters(module, ignored)
    assert list(found) == [name for name in ALL if name not in left_out]
    assert all(param is module.get_parameter(name) for name, (param, _) in found.items())
    assert {name for name, (_, sparse) in found.items() if sparse} == {"table.weight", "bag.weight"} - set(left_out)


def test_a_shared_parameter_goes_by_the_name_that_is_not_ignored() -> None:
    assert "b.weight" in reduced_parameters(Several(), ["a.weight"])
