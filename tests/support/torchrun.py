"""Scripts started by torchrun, two processes each."""

import os
import signal
import subprocess
import sys
from pathlib import Path


def torchrun(script: Path, *arguments: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    """Returns what the script printed; asserts that it ended well."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    process = subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | (env or {}),
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun then ends its processes, which are in sessions of their own
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, output[-5000:]
    return output
