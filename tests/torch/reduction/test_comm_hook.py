"""Comm hooks: torch's own run unchanged, and what is asked of others."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.buckets import DoneWork, bucket_of, done_future
from support.ids import named
from support.models import MLP, TiedEmbedding
from support.oracle import assert_equals_oracle, check_step, oracle
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks

from unified_ddp.errors import CommHookError, ReductionError
from unified_ddp.torch import DistributedDataParallel, GradBucket
from unified_ddp.torch.reduction.comm_hook import CommHook, DenseReduction, WorkReduction, check_comm_hook, hook_name
from unified_ddp.torch.reduction.storage import BucketStorage

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


# --- what is refused at registration


def other_bucket(state: Any, bucket: int) -> Future[torch.Tensor]:
    raise NotImplementedError


def other_return(state: Any, bucket: Any) -> int:
    raise NotImplementedError


def as_text(state: "Any", bucket: "dist.GradBucket") -> "Future[torch.Tensor]":
    raise NotImplementedError


def ours(state: Any, bucket: GradBucket) -> Future:
    raise NotImplementedError


def one_more(state: Any, bucket: Any, more: int = 3, *, other: int = 4) -> Any:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("hook", "error", "message"),
    [
        (1, TypeError, "Communication hook must be callable"),
        (
            lambda state: None,
            TypeError,
            r"hook .*<lambda>\(state\) must take two positional arguments, state and bucket",
        ),
        (lambda state, *, bucket: None, TypeError, "must take two positional arguments"),
        (functools.partial(mean_hook, None, None), TypeError, "hook mean_hook"),
        (other_bucket, ValueError, "bucket annotation should be dist.GradBucket"),
        (other_return, ValueError, r"return annotation should be torch.futures.Future\[torch.Tensor\]"),
    ],
)
def test_what_cannot_be_a_hook(hook: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        check_comm_hook(hook)


@pytest.mark.parametrize(
    "hook",
    [mean_hook, MeanHook(), as_text, ours, one_more, lambda *args: None, functools.partial(wide_hook, 0.5), max],
    ids=named,
)
def test_what_can_be_a_hook(hook: Any) -> None:
    check_comm_hook(hook)


@pytest.mark.parametrize(
    ("hook", "name"),
    [
        (mean_hook, "mean_hook"),
        (MeanHook(), "MeanHook"),
        (MeanHook.__call__, "MeanHook.__call__"),
        (functools.partial(mean_hook, None), "mean_hook"),
        (functools.partial(MeanHook()), "MeanHook"),
    ],
)
def test_the_name_of_a_hook(hook: Any, name: str) -> None:
    assert hook_name(hook) == name


def case_refused(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(MLP())
    with pytest.raises(TypeError, match="must be callable"):
        ddp.register_comm_hook(None, 1)
    messages = []

    def register(_: Any) -> None:
        with pytest.raises(RuntimeError) as caught:
            ddp.register_comm_hook(None, mean_hook)
        messages.append(str(caught.value))

    handle = ddp.module.layers[0].weight.register_post_accumulate_grad_hook(register)
    x = torch.randn(5, 8)
    check_step(ddp, lambda m: backward(m, x))
    handle.remove()
    assert messages == ["a comm hook cannot be registered during a backward pass; register it before"]
    ddp.register_comm_hook(None, mean_hook)
    with pytest.raises(RuntimeError, match="can only be called once"):
        ddp.register_comm_hook(None, mean_hook)
    with pytest.raises(RuntimeError, match="can only be called once"):
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    check_step(ddp, lambda m: backward(m, x))


def test_when_a_hook_is_refused(world: Callable[[int], Any]) -> None:
    world(2).run(case_refused)


# --- reductions


def bucket() -> GradBucket:
    param = torch.nn.Parameter(torch.zeros(3))
    return GradBucket(2, True, BucketStorage(bucket_of([param]), [param], as_views=False), ["p"])


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: [t], lambda t: (t,)], ids=["alone", "list", "tuple"])
@pytest.mark.parametrize("alone", [False, True])
def test_what_a_future_may_hold(wrap: Callable[[torch.Tensor], Any], alone: bool) -> None:
    result = torch.ones(3)
    reduction = CommHook(lambda state, bucket: done_future(wrap(result)), None, alone)(bucket())
    assert reduction.result() is result


@pytest.mark.parametrize("value", [None, "text", [], [torch.ones(1), torch.ones(1)], {"a": torch.ones(1)}], ids=str)
@pytest.mark.parametrize("alone", [False, True])
def test_what_a_future_may_not_hold(value: Any, alone: bool) -> None:
    reduction = CommHook(lambda state, bucket: done_future(value), None, alone)(bucket())
    with pytest.raises(TypeError, match=rf"future.* holds {type(value).__name__}; it must hold one tensor shaped as"):
        reduction.result()


def test_a_hook_that_returns_no_future_is_named() -> None:
    with pytest.raises(TypeError, match=r"MeanHook.* Tensor.* for bucket 2; it must return a torch.futures.Future"):
        CommHook(type("MeanHook", (), {"__call__": lambda self, state, bucket: torch.ones(3)})(), None)(bucket())


def test_a_hook_alone_runs_when_its_result_is_asked_for() -> None:
    calls: list[Any] = []

    def hook(state: Any, bucket: GradBucket) -> Future:
        calls.append((state, bucket.index()))
        return done_future(bucket.buffer())

    reduction = CommHook(hook, "state", alone=True)(bucket())
    assert calls == []
    assert reduction.result().shape == (3,)
    assert calls == [("state", 2)]
    CommHook(hook, "state")(bucket())
    assert len(calls) == 2


def test_collectives_are_waited_for() -> None:
    storage, work = torch.ones(3), DoneWork()
    assert WorkReduction(work, storage).result() is storage
    dense = torch.zeros(4, 2)
    dense[2] = 1
    summed = DenseReduction(work, dense).result()
    assert summed.is_sparse
    assert summed.sparse_dim() == 1
    assert summed.coalesce().indices().tolist() == [[2]]
    assert torch.equal(summed.to_dense(), dense)
    assert work.waits == 2


def case_hook_fails(rank: int, world_size: int, result: str) -> str:
    calls: list[int] = []

    def hook(state: Any, bucket: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            return mean_hook(state, bucket)
        if result == "raises":
            raise KeyError("user error")
        buffer = bucket.buffer()
        if result == "no future":
            return buffer
        values = {
            "short": buffer[1:],
            "text": "text",
            "integers": buffer.int(),
            "complex": buffer.to(torch.complex64),
            "sparse": buffer.to_sparse(),
            "meta": buffer.to("meta"),
        }
        future: Future[Any] = Future()
        future.set_result(values[result])
        return future

    ddp = DistributedDataParallel(MLP())
    ddp.register_comm_hook(None, hook)
    x = torch.randn(5, 8)
    with pytest.raises(KeyError if result == "raises" else CommHookError) as caught:
        backward(ddp, x)
    assert result == "raises" or isinstance(caught.value, RuntimeError)
    check_step(ddp, lambda m: backward(m, x))
    return str(caught.value)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ("raises", "user error"),
        ("no future", "callback must return a torch.futures.Future object, but got Tensor"),
        ("short", "elements"),
        ("text", "one tensor"),
        ("integers", "dtype torch.int32 for gradients of torch.float32"),
        ("complex", "dtype torch.complex64 for gradients of torch.float32"),
        ("sparse", "layout torch.sparse_coo"),
        ("meta", "on the meta device"),
    ],
)
def test_hooks_that_fail(world: Callable[[int], Any], result: str, text: str) -> None:
    for message in world(2).run(case_hook_fails, result=result):
        assert text in message


def case_hook_that_fails_in_communication(rank: int, world_size: int) -> str:
    def hook(state: Any, bucket: Any) -> Any:
        raise RuntimeError("connection closed")

    ddp = DistributedDataParallel(MLP())
    ddp.register_comm_hook(None, hook)
    with pytest.raises(ReductionError) as caught:
        backward(ddp, torch.randn(5, 8))
    return str(caught.value)


def test_a_hook_that_fails_in_communication_is_named(world: Callable[[int], Any]) -> None:
    for rank, message in enumerate(world(2).run(case_hook_that_fails_in_communication)):
        assert "the comm hook of bucket 0 (" in message
        assert f"failed on rank {rank}" in message
        assert "connection closed" in message
