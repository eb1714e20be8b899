"""Members of torch's Reducer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import MLP, TwoHeads
from support.oracle import check_step
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks

from unified_ddp.errors import UnusedParameterError
from unified_ddp.torch import DistributedDataParallel


def backward(module: nn.Module, x: torch.Tensor) -> None:
    module(x).pow(2).mean().backward()


def case_used_map(rank: int, world_size: int) -> list[int]:
    ddp = DistributedDataParallel(TwoHeads(), find_unused_parameters=True)
    ddp(torch.randn(5, 8), "lr"[rank])["lr"[rank]].sum().backward()
    return ddp.reducer._get_local_used_map().tolist()


def test_local_used_map_counts_ranks(world: Callable[[int], Any]) -> None:
    for counts in world(2).run(case_used_map):
        assert counts == [2, 2, 1, 1, 1, 1]


def case_late_static_graph(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(TwoHeads())
    ddp._set_static_graph()
    assert ddp.static_graph
    for _ in range(3):  # "right" is used in no iteration
        x = torch.randn(5, 8)
        check_step(ddp, lambda m, x=x: m(x, "l")["l"].pow(2).sum().backward())
    with pytest.warns(UserWarning, match="no need to set it again"):
        ddp._set_static_graph()
    finding = DistributedDataParallel(MLP(), find_unused_parameters=True)
    with pytest.warns(UserWarning, match="You passed find_unused_parameters=true"):
        finding._set_static_graph()
    other = DistributedDataParallel(MLP())
    backward(other, torch.randn(5, 8))
    with pytest.raises(RuntimeError, match="before training loop starts"):
        other._set_static_graph()


def test_static_graph_set_after_construction(world: Callable[[int], Any]) -> None:
    world(2).run(case_late_static_graph)


def case_buckets(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=0.002)
    reducer = ddp.reducer
    for _ in range(2):
        backward(ddp, torch.randn(5, 8))
    zeros = reducer._get_zeros_like_grad_buckets()
    assert [b.index() for b in zeros] == list(range(len(ddp.plan.buckets)))
    assert [b.is_last() for b in zeros] == [False] * (len(zeros) - 1) + [True]
    assert not any(bool(b.buffer().any()) for b in zeros)
    bucket = zeros[0]
    for run in (reducer._run_allreduce_hook, reducer._run_comm_hook):  # without a hook, sums that are not divided
        bucket.set_buffer(torch.full_like(bucket.buffer(), rank + 1.0))
        (summed,) = run(bucket).wait()
        assert torch.equal(summed, torch.full_like(summed, 3.0))
    hooked = DistributedDataParallel(MLP())
    hooked.register_comm_hook(None, debugging_hooks.noop_hook)
    (bucket,) = hooked.reducer._get_zeros_like_grad_buckets()
    bucket.set_buffer(torch.full_like(bucket.buffer(), rank + 1.0))
    assert torch.equal(hooked.reducer._run_comm_hook(bucket).wait(), bucket.buffer())


def test_buckets_and_their_reduction(world: Callable[[int], Any]) -> None:
    world(2).run(case_buckets)


def case_futures(rank: int, world_size: int) -> None:
    """A backward pass waits for what was installed before it, once."""
    ddp = DistributedDataParallel(MLP())
    future: torch.futures.Future = torch.futures.Future()
    waited: list[str] = []
    future.then(lambda _: waited.append("done"))
    ddp.module.layers[0].weight.register_post_accumulate_grad_hook(
        lambda _: None if future.done() else future.set_result(None)
    )
    ddp.reducer._install_post_backward_futures([future])
    x = torch.randn(5, 8)
    for _ in range(2):
        check_step(ddp, lambda m: backward(m, x))
        assert waited == ["done"]
    failed: torch.futures.Future = torch.futures.Future()
    failed.set_exception(ArithmeticError("on purpose"))
    ddp.reducer._install_post_backward_futures([failed])
    with pytest.raises(ArithmeticError, match="on purpose"):
        backward(ddp, x)


def test_futures_to_wait_for(world: Callable[[int], Any]) -> None:
    world(2).run(case_futures)


def case_state(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(TwoHeads(), bucket_cap_mb=0.0001)
    reducer = ddp.reducer
    x = torch.randn(5, 8)

    def run(heads: str) -> None:
        sum(v.sum() for v in ddp(x, heads).values()).backward()

    assert reducer._get_local_used_map().tolist() == [0] * 6
    reducer._push_all_rebuilt_params()
    assert reducer._rebuild_buckets()
    assert not reducer._rebuild_buckets()  # once
    assert [i for b in ddp.plan.buckets for i in b.params] == list(reversed(range(6)))
    run("lr")
    reducer._check_reducer_finalized()
    assert reducer.last_unused == []
    assert reducer._ddp_graph_static()
    reducer._reset_state()
    run("l")
    assert reducer.last_unused == [4, 5]
    with pytest.raises(UnusedParameterError, match=r"right\.weight, right\.bias"):
        reducer._check_reducer_finalized()
    reducer._reset_state()
    run("lr")
    assert reducer._rebuild_buckets()  # in the order of that pass


def test_state_that_can_be_reset(world: Callable[[int], Any]) -> None:
    world(2).run(case_state)
