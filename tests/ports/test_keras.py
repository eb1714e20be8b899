"""One Keras network under its torch and its JAX backend, each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from unified_ddp.equivalence import Report

HERE = Path(__file__).parent


@pytest.mark.timeout(900)
def test_backends_agree(tmp_path) -> None:
    sides = [f"{HERE / name}:make" for name in ("keras_torch.py", "keras_jax.py")]
    options = ["--until", "steps", "--ranks", "2", "--steps", "6", "--report", str(tmp_path / "keras.json")]
    command = [sys.executable, "-c", "from unified_ddp.cli import main; main()", "compare", *sides, *options]
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = Report.from_json((tmp_path / "keras.json").read_text())
    assert report.ok
    assert [rung.name for rung in report.rungs][-1] == "steps"
