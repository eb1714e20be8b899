"""The constructor's arguments: what is made of them, and what is refused."""

import copy
import dataclasses
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import MLP
from support.oracle import check_step
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel.distributed import _MixedPrecision

from unified_ddp.torch import DistributedDataParallel
from unified_ddp.torch import options as opts

MIB = 1 << 20
NAN, INF = float("nan"), float("inf")

# --- bucket caps

BAD_CAPS: list[tuple[str, Any, type[Exception], str]] = [
    *(("bucket_cap_mb", value, ValueError, repr(value)) for value in (0, -1, -0.5, NAN, INF, -INF)),
    *(("bucket_cap_mb", value, TypeError, repr(value)) for value in ("25", True, [25], (1, 2), 1j, object)),
    *(("bucket_cap_mb_list", [25, value], ValueError, repr(value)) for value in (0, -1.0, NAN, INF)),
    *(("bucket_cap_mb_list", [value], TypeError, repr(value)) for value in ("x", None, False, [25])),
    ("bucket_cap_mb_list", [], ValueError, "empty"),
    ("bucket_cap_mb_list", (), ValueError, "empty"),
    *(("bucket_cap_mb_list", value, TypeError, repr(value)) for value in (25, "25", 2.5, True)),
]


@pytest.mark.parametrize(("argument", "value", "error", "shown"), BAD_CAPS, ids=str)
def test_bucket_caps_that_cannot_be(argument: str, value: Any, error: type[Exception], shown: str) -> None:
    with pytest.raises(error) as caught:
        DistributedDataParallel(MLP(), **{argument: value})
    message = str(caught.value)
    assert message.startswith(argument + " ")
    assert shown in message


GIVEN: dict[str, Any] = {
    "caps": opts.BucketCaps.from_arguments(None, None),
    "delayed": frozenset(),
    "reduction": "mean",
}
"""Of options that are neither switches nor numbers that may be None."""
OTHERS: dict[str, Any] = {
    "caps": opts.BucketCaps.from_arguments(1, None),
    "delayed": frozenset(["a"]),
    "mixed_precision": _MixedPrecision(param_dtype=torch.bfloat16),
    "reduction": "sum",
}
FIELDS = {field.name: field.type for field in dataclasses.fields(opts.Options)}


def options(**changes: Any) -> opts.Options:
    usual = {name: GIVEN.get(name, False if kind is bool else None) for name, kind in FIELDS.items()}
    return opts.Options(**usual | changes)


UNBOUNDED = (sys.maxsize,)


@pytest.mark.parametrize(
    ("cap", "cap_list", "changes", "initial", "rebuilt"),
    [
        (None, None, {}, UNBOUNDED, (MIB, 25 * MIB)),
        (None, None, {"find_unused_parameters": True}, (MIB, 25 * MIB), (MIB, 25 * MIB)),
        (None, None, {"find_unused_parameters": True, "static_graph": True}, UNBOUNDED, (MIB, 25 * MIB)),
        (2, None, {}, UNBOUNDED, (2 * MIB, 2 * MIB)),
        (2, None, {"find_unused_parameters": True}, (2 * MIB,), (2 * MIB, 2 * MIB)),
        (2, [1, 3, 2], {}, (MIB, 3 * MIB, 2 * MIB), (MIB, 3 * MIB, 2 * MIB)),
        (None, [3], {"find_unused_parameters": True}, (3 * MIB,), (3 * MIB,)),
        (1e-9, None, {"find_unused_parameters": True}, (1,), (1, 1)),
    ],
)
def test_caps_of_first_and_rebuilt_buckets(
    cap: float | None, cap_list: Sequence[float] | None, changes: dict[str, Any], initial: tuple, rebuilt: tuple
) -> None:
    caps = opts.BucketCaps.from_arguments(cap, cap_list)
    found = options(caps=caps, **changes)
    assert (found.initial_caps, found.rebuilt_caps) == (initial, rebuilt)
    assert caps.is_default == (cap is cap_list is None)
    assert caps.largest == max(rebuilt)


# --- what ranks compare

MAY_DIFFER = {"gradient_as_bucket_view", "batched_grad_copy", "init_sync"}


@pytest.mark.parametrize("name", FIELDS)
def test_what_ranks_compare(name: str) -> None:
    other = OTHERS.get(name, True if FIELDS[name] is bool else 3)
    usual, changed = options().compared(), options(**{name: other}).compared()
    assert json.loads(json.dumps(changed)) == changed
    assert sum(usual[key] != changed[key] for key in usual) == (name not in MAY_DIFFER)


def test_compared_caps_and_names_have_one_order() -> None:
    lists = [opts.BucketCaps.from_arguments(None, caps) for caps in ([1, 2], [2, 1])]
    assert options(caps=lists[0]).compared() != options(caps=lists[1]).compared()
    several = options(delayed=frozenset(["b", "a", "c"])).compared()
    assert several["delay_all_reduce_named_params"] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"reduction": "average"}, ValueError, "'mean', 'sum', 'weighted_mean', not 'average'"),
        ({"check_replicas_every": 0}, ValueError, "positive number of steps or None, not 0"),
        ({"check_replicas_every": -3}, ValueError, "positive number of steps or None, not -3"),
        ({"check_replicas_every": 1.5}, TypeError, "number of steps or None, not 1.5"),
        ({"check_replicas_every": "2"}, TypeError, "number of steps or None, not '2'"),
        ({"check_replicas_every": True}, TypeError, "number of steps or None, not True"),
    ],
    ids=str,
)
def test_values_that_cannot_be(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        options(**changes)


# --- modules and devices


def test_delayed_parameters() -> None:
    module = MLP()
    named, trigger = [("head.bias", module.head.bias)], module.layers[0].weight
    assert opts.check_delayed(module, None, None) == {}
    assert opts.check_delayed(module, named, trigger) == dict(named)
    module.again = module.head  # a shared parameter has several names
    assert opts.check_delayed(module, [("again.bias", module.head.bias)], trigger) == {"again.bias": module.head.bias}


@pytest.mark.parametrize(
    ("delayed", "trigger", "message"),
    [
        ("head.bias", None, "need to be set at the same time"),
        (None, "head.bias", "need to be set at the same time"),
        ("elsewhere", "head.bias", "names 'elsewhere', which is no parameter of the module"),
        ("head.bias", "elsewhere", "param_to_hook_all_reduce is no parameter of the module"),
    ],
)
def test_delayed_parameters_that_cannot_be(delayed: str | None, trigger: str | None, message: str) -> None:
    module = MLP()
    params = {**dict(module.named_parameters()), "elsewhere": nn.Parameter(torch.zeros(4))}
    named = [(delayed, params[delayed])] if delayed else None
    with pytest.raises(ValueError, match=message):
        DistributedDataParallel(
            module, delay_all_reduce_named_params=named, param_to_hook_all_reduce=params.get(trigger)
        )


def test_a_delayed_parameter_under_anothers_name() -> None:
    module = MLP()
    with pytest.raises(ValueError, match=r"names 'head\.weight', which is no parameter"):
        opts.check_delayed(module, [("head.weight", module.head.bias)], module.head.bias)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (MLP().requires_grad_(False), "requires a gradient"),
        (nn.Sequential(), "requires a gradient"),
        (nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(4)), "dummy forward"),
    ],
    ids=["frozen", "empty", "lazy"],
)
def test_modules_without_a_parameter_to_reduce(module: nn.Module, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        opts.check_parameters(list(module.parameters()))


def params_on(*devices: str) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2, device=device)) for device in devices]


def test_placement_on_the_cpu() -> None:
    for device_ids in (None, []):
        placement = opts.Placement.of(params_on("cpu", "cpu"), device_ids, None)
        assert placement == opts.Placement(torch.device("cpu"), False, None, None)


@pytest.mark.parametrize(
    ("devices", "device_ids", "output_device", "message"),
    [
        (["cpu"], [0, 1], None, "single element"),
        (["cpu"], [0], None, r"got device_ids \[0\], output_device None"),
        (["cpu"], None, 1, r"got device_ids None, output_device 1"),
        (["cpu", "meta"], None, None, "same type of devices"),
    ],
)
def test_placements_that_cannot_be(
    devices: list[str], device_ids: list[int] | None, output_device: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        opts.Placement.of(params_on(*devices), device_ids, output_device)


# --- buffers and deprecated arguments


@pytest.mark.parametrize(
    ("broadcast_buffers", "forward_sync_buffers", "in_forward", "at_construction", "warning"),
    [
        (None, None, True, True, None),
        (None, False, False, True, None),
        (None, True, True, True, None),
        (True, None, True, True, "Use `forward_sync_buffers` instead"),
        (False, None, False, False, "Use `forward_sync_buffers` instead"),
        (False, True, True, True, "Both `broadcast_buffers` and `forward_sync_buffers`"),
        (True, False, False, True, "Both `broadcast_buffers` and `forward_sync_buffers`"),
    ],
)
def test_which_buffers_are_synchronised(
    broadcast_buffers: bool | None,
    forward_sync_buffers: bool | None,
    in_forward: bool,
    at_construction: bool,
    warning: str | None,
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = opts.resolve_buffer_sync(broadcast_buffers, forward_sync_buffers)
    assert found == (in_forward, at_construction)
    assert [(w.category, warning in str(w.message)) for w in caught] == ([(FutureWarning, True)] if warning else [])


def test_check_reduction_is_deprecated() -> None:
    with pytest.warns(FutureWarning, match="`check_reduction` argument"):
        opts.warn_deprecated(True)
    with warnings.catch_warnings(action="error"):
        opts.warn_deprecated(False)


@pytest.mark.parametrize(("value", "used"), [(None, True), ("1", True), ("0", False)])
def test_the_side_stream_of_inputs(monkeypatch: pytest.MonkeyPatch, value: str | None, used: bool) -> None:
    if value is None:
        monkeypatch.delenv("PYTORCH_DDP_USE_SIDE_STREAM", raising=False)
    else:
        monkeypatch.setenv("PYTORCH_DDP_USE_SIDE_STREAM", value)
    assert opts.use_side_stream() is used


# --- meshes


def backward(module: nn.Module, x: torch.Tensor) -> None:
    module(x).pow(2).mean().backward()


def case_mesh(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    ddp = DistributedDataParallel(MLP(), device_mesh=mesh)
    assert ddp.process_group is mesh.get_group()
    assert ddp.device_mesh is mesh
    for _ in range(3):
        x = torch.randn(5, 8)
        check_step(ddp, lambda m, x=x: backward(m, x))
    with pytest.raises(RuntimeError, match="both process_group and device_mesh"):
        DistributedDataParallel(MLP(), device_mesh=mesh, process_group=dist.group.WORLD)
    with pytest.raises(RuntimeError, match="1D"):
        DistributedDataParallel(MLP(), device_mesh=init_device_mesh("cpu", (world_size, 1)))


def test_device_mesh(world: Callable[[int], Any]) -> None:
    world(2).run(case_mesh)


def case_mesh_slice(rank: int, world_size: int) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(2)
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    plain = copy.deepcopy(module)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    ddp = DistributedDataParallel(parallelize_module(module, mesh["tensor"], plan), device_mesh=mesh["data"])
    local = dict(ddp.module.named_parameters())  # torch shows the sharded tensors in their place from the forward on
    assert not any(isinstance(p, DTensor) for p in local.values())
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    backward(ddp, x)
    backward(plain, x)
    for name, dim in (("0.weight", 0), ("2.weight", 1)):
        whole = plain.get_parameter(name).grad
        assert whole is not None
        torch.testing.assert_close(local[name].grad, whole.chunk(world_size, dim=dim)[rank])


def test_tensor_parallel_module_on_a_slice_of_a_mesh(world: Callable[[int], Any]) -> None:
    world(2).run(case_mesh_slice)
