"""Comm hooks: torch's own run unchanged, and what is asked of others."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import MLP, TiedEmbedding
from support.oracle import assert_equals_oracle, check_step, oracle
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks

from unified_ddp.torch import DistributedDataParallel

Future = torch.futures.Future


def backward(module: torch.nn.Module, x: torch.Tensor) -> None:
    module(x).pow(2).mean().backward()


def mean_hook(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda f: f.value()[0] / dist.get_world_size())


class MeanHook:
    def __call__(self, state: Any, the_bucket: Any) -> Any:
        return mean_hook(state, the_bucket)


def wide_hook(factor: float, state: Any, bucket: Any) -> Any:
    """Returns a new tensor, in float64."""
    new = bucket.buffer().double() * factor
    return dist.all_reduce(new, async_op=True).get_future().then(lambda f: f.value()[0].to(bucket.buffer().dtype))


HOOKS: dict[str, Callable[[], tuple[Any, Any, float]]] = {
    "function": lambda: (None, mean_hook, 1e-5),
    "callable object": lambda: (None, MeanHook(), 1e-5),
    "partial": lambda: (None, functools.partial(wide_hook, 0.5), 1e-5),
    "allreduce_hook": lambda: (None, default_hooks.allreduce_hook, 1e-5),
    "fp16_compress_hook": lambda: (None, default_hooks.fp16_compress_hook, 2e-3),
    "bf16_compress_hook": lambda: (None, default_hooks.bf16_compress_hook, 2e-2),
    "fp16 wrapper": lambda: (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), 2e-3),
    "bf16 wrapper": lambda: (None, default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook), 2e-2),
}


def case_hook(rank: int, world_size: int, hook: str, view: bool) -> None:
    state, function, k = HOOKS[hook]()
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=0.002, gradient_as_bucket_view=view)
    ddp.register_comm_hook(state, function)
    for _ in range(3):
        x = torch.randn(5, 8)
        check_step(ddp, lambda m, x=x: backward(m, x), k)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_that_average(world: Callable[[int], Any], hook: str, view: bool) -> None:
    world(2).run(case_hook, hook=hook, view=view)


def case_noop(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(MLP())
    ddp.register_comm_hook(None, debugging_hooks.noop_hook)
    x = torch.randn(5, 8)
    other = MLP()
    other.load_state_dict(ddp.module.state_dict())
    backward(other, x)
    backward(ddp, x)
    for mine, theirs in zip(ddp.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_noop_leaves_local_gradients(world: Callable[[int], Any]) -> None:
    world(2).run(case_noop)


def case_bucket_interface(rank: int, world_size: int) -> None:
    seen: list[tuple[int, bool]] = []

    def hook(state: Any, bucket: Any) -> Future[torch.Tensor]:
        seen.append((bucket.index(), bucket.is_last()))
        parts = torch.cat([g.reshape(-1) for g in bucket.gradients()])
        assert torch.equal(parts, bucket.buffer())
        assert [g.shape for g in bucket.gradients()] == [p.shape for p in bucket.parameters()]
        bucket.set_buffer(torch.ones_like(bucket.buffer()))
        assert all(bool((g == 1).all()) for g in bucket.gradients())
        future: Future[torch.Tensor] = Future()
        future.set_result(bucket.buffer())
        return future

    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=0.002)
    ddp.register_comm_hook(None, hook)
    for _ in range(2):
        seen.clear()
        backward(ddp, torch.randn(5, 8))
        assert all(bool((p.grad == 1).all()) for p in ddp.parameters())
    buckets = len(ddp.plan.buckets)
    assert buckets > 1
    assert seen == [(i, i == buckets - 1) for i in range(buckets)]


def test_what_a_hook_is_given(world: Callable[[int], Any]) -> None:
    world(2).run(case_bucket_interface)


def case_sparse_hook(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(TiedEmbedding(sparse=True))
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    tokens = torch.randint(0, 20, (5, 3))
    expected = oracle(ddp.module, lambda m: backward(m, tokens))
    backward(ddp, tokens)
    assert_equals_oracle(ddp.module, expected)


def test_hook_on_a_sparse_bucket(world: Callable[[int], Any]) -> None:
    world(2).run(case_sparse_hook)


def case_refused(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(MLP())

    def other_bucket(state: Any, bucket: int) -> Future[torch.Tensor]:
        raise NotImplementedError

    def other_return(state: Any, bucket: Any) -> int:
        raise NotImplementedError

    with pytest.raises(TypeError, match="must be callable"):
        ddp.register_comm_hook(None, 1)
    with pytest.raises(TypeError, match="two positional arguments"):
        ddp.register_comm_hook(None, lambda state: None)
    with pytest.raises(ValueError, match="bucket annotation"):
        ddp.register_comm_hook(None, other_bucket)
    with pytest.raises(ValueError, match="return annotation"):
        ddp.register_comm_hook(None, other_return)
    ddp.register_comm_hook(None, mean_hook)
    with pytest.raises(RuntimeError, match="only be called once"):
        ddp.register_comm_hook(None, mean_hook)


def test_hooks_that_are_refused(world: Callable[[int], Any]) -> None:
    world(2).run(case_refused)


def case_hook_fails(rank: int, world_size: int, result: str) -> str:
    calls: list[int] = []

    def hook(state: Any, bucket: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            return mean_hook(state, bucket)
        if result == "raises":
            raise KeyError("user error")
        if result == "no future":
            return bucket.buffer()
        future: Future[Any] = Future()
        future.set_result(bucket.buffer()[1:] if result == "short" else "text")
        return future

    ddp = DistributedDataParallel(MLP())
    ddp.register_comm_hook(None, hook)
    x = torch.randn(5, 8)
    with pytest.raises((KeyError, TypeError, ValueError)) as caught:
        backward(ddp, x)
    check_step(ddp, lambda m: backward(m, x))
    return str(caught.value)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ("raises", "user error"),
        ("no future", "must return a torch.futures.Future"),
        ("short", "elements"),
        ("text", "one tensor"),
    ],
)
def test_hooks_that_fail(world: Callable[[int], Any], result: str, text: str) -> None:
    for message in world(2).run(case_hook_fails, result=result):
        assert text in message
