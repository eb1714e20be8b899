"""The examples run on two CPU devices, or in two processes, and train."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.torchrun import torchrun

EXAMPLES = Path(__file__).parents[2] / "examples"
TWO_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("name", "packages", "loss", "rest"),
    [
        ("jax_pytree", [], 0.1, ""),
        ("jax_linen", ["flax"], 0.4, r", accuracy (0\.[89]\d*|1\.0+)"),
        ("jax_nnx", ["flax"], 0.4, r", accuracy (0\.[89]\d*|1\.0+)"),
        ("jax_equinox", ["equinox"], 0.1, r", model\(1, 1, 1\) (2\.[5-9]|3\.)\d*"),
    ],
)
def test_example(name: str, packages: list[str], loss: float, rest: str) -> None:
    for package in packages:
        pytest.importorskip(package)
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    result = subprocess.run(command, env=os.environ | TWO_DEVICES, capture_output=True, text=True, timeout=150)
    assert result.returncode == 0, result.stderr
    found = re.fullmatch(rf"2 devices: loss (\d\.\d+){rest}\n", result.stdout)
    assert found, result.stdout
    assert float(found[1]) < loss


@pytest.mark.timeout(180)
def test_example_under_torchrun() -> None:
    output = torchrun(EXAMPLES / "jax_torchrun.py", env=TWO_DEVICES)
    lines = sorted(re.findall(r"process (\d) of 2: loss (\d\.\d+), b (\d\.\d+)", output))
    assert [rank for rank, _, _ in lines] == ["0", "1"], output
    assert lines[0][1:] == lines[1][1:]
    assert abs(float(lines[0][2]) - 1) < 0.01
