"""The code of docs/comm_hooks.md runs as it stands, in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")

PAGE = Path(__file__).parents[2] / "docs" / "comm_hooks.md"

ONE_RANK = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""
USE_THE_REST = """
model = DistributedDataParallel(torch.nn.Linear(4, 4))
model.register_comm_hook(HookState(Clipped()), shared_hook)
(9 * model(torch.ones(1, 4))).sum().backward()
assert (model.module.weight.grad == 1).all()
assert float(loss) < 1e6
"""


@pytest.mark.timeout(300)
def test_code_of_the_page_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) == 3
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    code = "\n".join([ONE_RANK, *blocks, USE_THE_REST])
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr
