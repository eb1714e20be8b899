"""What importing the adapter loads, and needs."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(120)


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)


def test_import_loads_no_torch() -> None:
    result = _python("import sys, unified_ddp.jax; assert 'torch' not in sys.modules and 'flax' not in sys.modules")
    assert result.returncode == 0, result.stderr


WITHOUT_JAX = """
import sys

class NoJax:
    def find_spec(self, name, path=None, target=None):
        if name == "jax":
            raise ModuleNotFoundError("No module named 'jax'", name="jax")

sys.meta_path.insert(0, NoJax())
import unified_ddp
import unified_ddp.jax
"""


def test_import_without_jax_says_what_to_install() -> None:
    result = _python(WITHOUT_JAX)
    assert result.returncode != 0
    assert "ImportError: unified_ddp.jax needs JAX; install it with: pip install unified_ddp[jax]" in result.stderr
