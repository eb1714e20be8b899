"""`install()` puts our class in the place of torch's, and takes it away again."""

import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import MLP

import unified_ddp.torch
from unified_ddp.torch import DistributedDataParallel, install

TORCHS = (torch.nn.parallel.DistributedDataParallel,)  # in a tuple, as a global of this module would be rebound, too


def found_in_torch() -> set[type]:
    return {torch.nn.parallel.DistributedDataParallel, torch.nn.parallel.distributed.DistributedDataParallel}


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], types.ModuleType]]:
    """Makes and imports a module of the given name and source."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made: list[str] = []

    def make(name: str, source: str) -> types.ModuleType:
        (tmp_path / f"{name}.py").write_text(source)
        made.append(name)
        return __import__(name)

    yield make
    for name in made:
        del sys.modules[name]


IMPORT = "from torch.nn.parallel import DistributedDataParallel as DDP\n"


def test_a_library_that_imported_torchs_class_gets_ours(library: Callable[[str, str], types.ModuleType]) -> None:
    before = library("library_before", IMPORT)
    with install():
        assert found_in_torch() == {DistributedDataParallel}
        assert before.DDP is DistributedDataParallel
        during = library("library_during", IMPORT)
        assert during.DDP is DistributedDataParallel
        assert unified_ddp.torch.wrapped.TorchDDP is TORCHS[0]
    assert before.DDP is during.DDP is TORCHS[0]
    assert found_in_torch() == {TORCHS[0]}


def test_what_chose_ours_keeps_it(library: Callable[[str, str], types.ModuleType]) -> None:
    ours = "from unified_ddp.torch import DistributedDataParallel as DDP\n"
    before = library("chose_before", ours)
    with install():
        during = library("chose_during", ours)
    assert before.DDP is during.DDP is DistributedDataParallel


def test_nested_and_repeated() -> None:
    outer = install()
    with install() as inner:
        inner.uninstall()
        assert torch.nn.parallel.DistributedDataParallel is DistributedDataParallel
        outer.uninstall()
        assert torch.nn.parallel.DistributedDataParallel is TORCHS[0]
    outer.uninstall()
    assert torch.nn.parallel.DistributedDataParallel is TORCHS[0]


def test_an_exception_inside_undoes_it() -> None:
    with pytest.raises(KeyError), install():
        raise KeyError
    assert found_in_torch() == {TORCHS[0]}


def case_constructed_by_others(rank: int, world_size: int) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DataParallel

    old = TORCHS[0](MLP())
    for _ in range(2):
        with install():
            ddp = torch.nn.parallel.DistributedDataParallel(MLP())
            assert type(ddp) is DistributedDataParallel
            assert isinstance(ddp, TORCHS[0])
            assert not isinstance(ddp, DataParallel)
            optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
            for model in (ddp, old):
                model(torch.randn(5, 8)).sum().backward()
            optimizer.step()
            assert torch.nn.parallel.DistributedDataParallel._get_active_ddp_module() is None
        ddp(torch.randn(5, 8)).sum().backward()
        new = torch.nn.parallel.DistributedDataParallel(MLP())
        assert type(new) is TORCHS[0]
        new(torch.randn(5, 8)).sum().backward()


def test_training_with_what_others_construct(world: Callable[[int], Any]) -> None:
    world(2).run(case_constructed_by_others)


def test_without_torch_distributed_imported_before() -> None:
    source = (
        "from unified_ddp.torch import install, DistributedDataParallel as ours\n"
        "with install():\n"
        "    from torch.nn.parallel.distributed import DistributedDataParallel as found\n"
        "    assert found is ours\n"
        "import torch\n"
        "assert torch.nn.parallel.DistributedDataParallel is not ours\n"
    )
    subprocess.run([sys.executable, "-c", source], check=True, timeout=120)
