"""One GPU: NCCL at world size 1, where a reduction must leave gradients as plain autograd has them."""

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from support.models import MLP, ConvNet, Mixed
from torch import nn

from unified_ddp.torch import DistributedDataParallel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]


@pytest.fixture(scope="module", autouse=True)
def _group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def backward(module: nn.Module, x: torch.Tensor) -> None:
    (module(x).abs() ** 2).mean().backward()


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("make", [MLP, lambda: MLP(600, 3), lambda: ConvNet(channels_last=True), Mixed])
def test_nccl_leaves_the_gradients_of_one_rank(make: type[nn.Module], view: bool) -> None:
    model = make().cuda()
    width = 64 if isinstance(model, ConvNet) else 8
    ddp = DistributedDataParallel(model, device_ids=[0], gradient_as_bucket_view=view, bucket_cap_mb=0.01)
    for _ in range(3):
        x = torch.randn(5, width, device="cuda")
        other = copy.deepcopy(ddp.module)
        backward(other, x)
        ddp.zero_grad()
        backward(ddp, x)
        for mine, theirs in zip(ddp.module.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
