"""The training script runs under torchrun, goes on from its checkpoint, and loads data by forkserver and spawn."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "torch_ddp.py"


def torchrun(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    process = subprocess.Popen(
        [*command, "--checkpoint", str(folder / "checkpoint.pt"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""},
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # torchrun and its ranks: a session of their own
        raise
    assert process.returncode == 0, output
    return output


def losses(output: str) -> dict[int, float]:
    return {int(e): float(loss) for e, loss in re.findall(r"epoch (\d+): loss ([\d.]+)", output)}


@pytest.mark.timeout(400)
def test_it_trains_and_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    whole = losses(torchrun(tmp_path, "--epochs", "3", "--workers", "0"))
    assert list(whole) == [0, 1, 2]
    assert whole[2] < whole[0] / 2
    (tmp_path / "checkpoint.pt").unlink()
    half = losses(torchrun(tmp_path, "--epochs", "2", "--start-method", "forkserver"))
    rest = losses(torchrun(tmp_path, "--epochs", "3", "--start-method", "spawn"))
    # however the data is loaded, and whether or not the run was interrupted
    assert half | rest == whole
