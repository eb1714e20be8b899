"""Hooks of unified_ddp.hooks on gloo ranks: the numbers that the same hook gives on the host."""

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.hook_cases import BUCKET_BYTES, HOOKS, SHAPES, STEPS, HostRanks, assert_close, gradients

from unified_ddp.errors import MisuseError
from unified_ddp.hooks import AllReduce, Compressed, PowerSGD, Quantize8, SharedHook, TopK
from unified_ddp.hooks.protocol import BucketLayout
from unified_ddp.plan import MIB
from unified_ddp.torch import DistributedDataParallel, HookState, shared_hook


class Linear(torch.nn.Module):
    """Its gradients are exactly what it is given."""

    def __init__(self, channels_last: bool = False) -> None:
        super().__init__()
        # torch takes no dots in names of parameters
        self.values = torch.nn.ParameterDict({name.replace(".", "_"): torch.zeros(s) for name, s in SHAPES.items()})
        if channels_last:
            kernel = self.values["conv_kernel"]
            kernel.data = kernel.data.contiguous(memory_format=torch.channels_last)

    def forward(self, wanted: dict[str, np.ndarray]) -> torch.Tensor:
        terms = [(self.values[n.replace(".", "_")] * torch.tensor(w)).sum() for n, w in wanted.items()]
        return torch.stack(terms).sum()

    def gradients(self) -> dict[str, np.ndarray]:
        return {name: self.values[name.replace(".", "_")].grad.numpy() for name in SHAPES}


def plain_names(layout: BucketLayout) -> BucketLayout:
    """The layout with the names of SHAPES."""
    of = {f"values.{name.replace('.', '_')}": name for name in SHAPES}
    return BucketLayout(layout.index, layout.dtype, tuple(of[name] for name in layout.names), layout.shapes)


class Renamed(SharedHook):
    """A hook under the names of SHAPES, which seed PowerSGD; records the layouts that it saw."""

    def __init__(self, inner: SharedHook) -> None:
        self.inner = inner
        self.seen: list[BucketLayout] = []

    def init(self, layout: BucketLayout) -> Any:
        return self.inner.init(plain_names(layout))

    def __call__(self, state: Any, bucket: Any, /) -> Any:
        self.seen.append(plain_names(bucket.layout))
        return (yield from self.inner(state, dataclasses.replace(bucket, layout=self.seen[-1])))

    def carry(self, ops: Any, layout: BucketLayout, state: Any, sources: Any) -> Any:
        return self.inner.carry(ops, layout, state, sources)


def case_same_numbers(rank: int, world_size: int, name: str) -> None:
    """Buckets are planned anew after the first step, so states must move with their parameters."""
    hook, *tolerances = HOOKS[name]
    recorder = Renamed(hook)
    ddp = DistributedDataParallel(Linear(), bucket_cap_mb=BUCKET_BYTES / MIB)
    ddp.register_comm_hook(HookState(recorder), shared_hook)
    host = HostRanks(hook, world_size)
    layouts = []
    for step in range(STEPS):
        recorder.seen.clear()
        local = [gradients(step, r) for r in range(world_size)]
        # the order in which gradients come differs from that of the first plan
        ddp.module.zero_grad()
        ddp(dict(sorted(local[rank].items(), key=lambda item: item[1].size))).backward()
        layouts.append([layout.names for layout in recorder.seen])
        want = host.step(recorder.seen, local)[rank]
        assert_close(ddp.module.gradients(), want, tolerances[world_size > 2])
    assert len(layouts[1]) > 1
    assert layouts[0] != layouts[1]


@pytest.mark.parametrize("name", HOOKS)
def test_same_numbers_as_on_the_host(world: Callable[[int], Any], name: str) -> None:
    world(2).run(case_same_numbers, name=name)


@pytest.mark.parametrize("name", ["allreduce", "topk", "quantize8", "powersgd"])
def test_same_numbers_on_three_ranks(world: Callable[[int], Any], name: str) -> None:
    world(3).run(case_same_numbers, name=name)


def train(ddp: Any, rank: int, world_size: int, steps: range) -> list[np.ndarray]:
    results = []
    for step in steps:
        ddp.zero_grad()
        ddp(gradients(step, rank)).backward()
        results += list(ddp.module.gradients().values())
    return results


def case_copied_state(rank: int, world_size: int, how: str) -> None:
    ddp = DistributedDataParallel(Linear())
    state = HookState(Compressed(PowerSGD(rank=2, start_step=1), "float16"))
    ddp.register_comm_hook(state, shared_hook)
    train(ddp, rank, world_size, range(3))
    if how == "pickle":
        ddp2 = DistributedDataParallel(copy.deepcopy(ddp.module))
        ddp2.register_comm_hook(pickle.loads(pickle.dumps(state)), shared_hook)
    else:
        ddp2 = copy.deepcopy(ddp)
    for a, b in zip(train(ddp, rank, world_size, range(3, 6)), train(ddp2, rank, world_size, range(3, 6)), strict=True):
        assert np.max(np.abs(a - b), initial=0) <= 1e-5 * np.max(np.abs(a), initial=0)


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_state_survives(world: Callable[[int], Any], how: str) -> None:
    world(2).run(case_copied_state, how=how)


def case_layouts(rank: int, world_size: int) -> None:
    """channels_last lies in the bucket with its channels last, and full rank loses nothing in any layout."""
    ddp = DistributedDataParallel(Linear(channels_last=True))
    recorder = Renamed(PowerSGD(rank=12, min_compression_rate=0))
    ddp.register_comm_hook(HookState(recorder), shared_hook)
    grads = [gradients(0, r) for r in range(world_size)]
    ddp(grads[rank]).backward()
    shapes = dict(zip(recorder.seen[0].names, recorder.seen[0].shapes, strict=True))
    assert shapes["conv.kernel"] == (3, 4, 8, 3)
    want = {name: np.mean([g[name] for g in grads], axis=0) for name in SHAPES}
    assert_close(ddp.module.gradients(), want, 1e-5)


def test_parameters_in_other_memory_layouts(world: Callable[[int], Any]) -> None:
    world(2).run(case_layouts)


def case_half(rank: int, world_size: int, dtype: torch.dtype) -> None:
    """Half-precision gradients are compressed and kept in float32."""
    for hook in (TopK(ratio=1.0), Quantize8(block=16), PowerSGD(rank=12, min_compression_rate=0)):
        ddp = DistributedDataParallel(Linear().to(dtype))
        state = HookState(hook)
        ddp.register_comm_hook(state, shared_hook)
        ddp(gradients(0, rank)).backward()
        for (name, want), got in zip(gradients(0, 0).items(), ddp.module.parameters(), strict=True):
            want = (want + gradients(0, 1)[name]) / 2
            error = np.max(np.abs(got.grad.double().numpy() - want), initial=0)
            assert error <= 2e-2 * np.max(np.abs(want), initial=0) + 2e-2, name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_gradients(world: Callable[[int], Any], dtype: torch.dtype) -> None:
    world(2).run(case_half, dtype=dtype)


def case_refused(rank: int, world_size: int) -> None:
    embedding = DistributedDataParallel(torch.nn.Embedding(4, 2, sparse=True))
    embedding.register_comm_hook(HookState(TopK()), shared_hook)
    with pytest.raises(MisuseError, match=r"bucket 0 \(weight\) is a sparse gradient"):
        embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="takes a hook of"):
        HookState(len)
    complex_model = torch.nn.Linear(2, 2, dtype=torch.complex64)
    ddp = DistributedDataParallel(complex_model)
    ddp.register_comm_hook(HookState(TopK()), shared_hook)
    with pytest.raises(MisuseError, match=r"TopK .* holds complex64"):
        ddp(torch.ones(1, 2, dtype=torch.complex64)).abs().sum().backward()


def test_what_is_refused(world: Callable[[int], Any]) -> None:
    world(2).run(case_refused)


class Failing(SharedHook):
    """Fails in its second round, once, in the second bucket."""

    def __init__(self) -> None:
        self.failed = False

    def __call__(self, state: Any, bucket: Any, /) -> Any:
        mean = yield from bucket.mean(bucket.storage, bucket.layout.dtype)
        if bucket.layout.index == 1 and not self.failed:
            self.failed = True
            raise KeyError("user error")
        return mean, state


def case_hook_fails(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(Linear(), bucket_cap_mb=BUCKET_BYTES / MIB)
    ddp.register_comm_hook(HookState(Failing()), shared_hook)
    ddp(gradients(0, rank)).backward()  # in one bucket; the next one is in several
    with pytest.raises(KeyError, match="user error"):
        ddp(gradients(0, rank)).backward()
    ddp.zero_grad()
    ddp(gradients(1, rank)).backward()
    want = {name: (gradients(1, 0)[name] + gradients(1, 1)[name]) / 2 for name in SHAPES}
    assert_close(ddp.module.gradients(), want, 1e-6)


def test_a_hook_that_fails_leaves_the_wrapper_usable(world: Callable[[int], Any]) -> None:
    world(2).run(case_hook_fails)


def case_wrapped(rank: int, world_size: int) -> None:
    """A hook of the user's may call ours and go on with its future."""
    state = HookState(AllReduce())

    def doubled(_: Any, bucket: Any) -> Any:
        return shared_hook(state, bucket).then(lambda future: 2 * future.value())

    ddp = DistributedDataParallel(Linear())
    ddp.register_comm_hook(None, doubled)
    ddp(gradients(0, rank)).backward()
    want = {name: gradients(0, 0)[name] + gradients(0, 1)[name] for name in SHAPES}
    assert_close(ddp.module.gradients(), want, 1e-6)


def test_wrapped_by_a_users_hook(world: Callable[[int], Any]) -> None:
    world(2).run(case_wrapped)
