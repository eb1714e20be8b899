"""The code of docs/jax.md runs as it stands, in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("optax")

PAGE = Path(__file__).parents[2] / "docs" / "jax.md"

USE_THE_REST = """
microbatches = jax.tree.map(lambda leaf: leaf.reshape(8, 4, *leaf.shape[1:]), batch)
mapped = jax.shard_map(accumulating_step, mesh=mesh, in_specs=(P(), P(None, "data")), out_specs=P())
grads, loss = jax.jit(mapped)(params, microbatches)
assert jax.tree.structure(grads) == jax.tree.structure(params)
"""


@pytest.mark.timeout(120)
def test_code_of_the_page_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) == 4
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    code = "\n".join([*blocks, USE_THE_REST])
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(r"loss 0\.\d{4}\n", result.stdout), result.stdout
