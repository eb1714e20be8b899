"""The README shows the examples as they are, and the examples run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TORCH, JAX = "examples/torch_quickstart.py", "examples/jax_quickstart.py"


@pytest.mark.parametrize("example", [TORCH, JAX])
def test_the_readme_shows_the_example_word_for_word(example):
    text = (ROOT / example).read_text()
    assert f"```python\n{text}```" in (ROOT / "README.md").read_text()
    assert len([line for line in text.splitlines() if line]) <= 18


def test_links_of_the_readme_lead_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", (ROOT / "README.md").read_text())
    assert [link for link in links if not (ROOT / link).exists()] == []


def run(command: list[str], environment: dict[str, str], tmp_path: Path) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(150)
def test_the_torch_example_runs_under_torchrun(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    out = run([*torchrun, str(ROOT / TORCH)], {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}, tmp_path)
    losses = [float(loss) for loss in re.findall(r"rank \d: loss (\d+\.\d{6})", out)]  # ranks may share a line
    assert len(losses) == 2
    assert max(losses) < 1e-4


@pytest.mark.timeout(150)
def test_the_jax_example_runs_on_two_devices(tmp_path):
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    out = run([sys.executable, str(ROOT / JAX)], environment, tmp_path)
    assert out.startswith("2 devices: loss ")
    assert float(out.split()[-1]) < 1e-4
