"""The training script runs under torchrun, goes on from its checkpoint, and loads data by forkserver and spawn."""

import re
from pathlib import Path

import pytest
from support.torchrun import torchrun

SCRIPT = Path(__file__).parents[3] / "examples" / "torch_ddp.py"


def train(folder: Path, *arguments: str) -> str:
    options = ("--checkpoint", str(folder / "checkpoint.pt"), *arguments)
    return torchrun(SCRIPT, *options, env={"GLOO_SOCKET_IFNAME": "lo"}, cwd=folder)


def losses(output: str) -> dict[int, float]:
    return {int(e): float(loss) for e, loss in re.findall(r"epoch (\d+): loss ([\d.]+)", output)}


@pytest.mark.timeout(400)
def test_it_trains_and_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    whole = losses(train(tmp_path, "--epochs", "3", "--workers", "0"))
    assert list(whole) == [0, 1, 2]
    assert whole[2] < whole[0] / 2
    (tmp_path / "checkpoint.pt").unlink()
    half = losses(train(tmp_path, "--epochs", "2", "--start-method", "forkserver"))
    rest = losses(train(tmp_path, "--epochs", "3", "--start-method", "spawn"))
    # however the data is loaded, and whether or not the run was interrupted
    assert half | rest == whole
