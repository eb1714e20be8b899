"""csrc_shared <- unified_ddp._core <- unified_ddp <- the adapters <- command line and tests."""

import ast
import importlib.util
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FRAMEWORKS = {"torch": {"torch", "torchvision"}, "jax": {"jax", "jaxlib", "flax", "optax"}}
CORE = [
    path
    for folder in ("", "hooks", "equivalence", "equivalence/mapping")
    for path in sorted((ROOT / "unified_ddp" / folder).glob("*.py"))
    if not path.name.startswith("cli")
]
ADAPTERS = [(name, path) for name in FRAMEWORKS for path in sorted((ROOT / "adapters" / name).rglob("*.py"))]


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120)


def imported_by(path: pathlib.Path) -> set[str]:
    """Returns the full names of the modules a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively; give the full name"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def top_level(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def test_core_loads_no_framework() -> None:
    paths = [path.relative_to(ROOT).with_suffix("") for path in CORE]
    modules = [".".join(path.parts).removesuffix(".__init__") for path in paths]
    code = f"import sys, {', '.join(modules)}\nassert not {{'torch', 'jax', 'flax'}} & set(sys.modules)"
    done = run(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", CORE, ids=lambda p: p.name)
def test_core_names_no_framework(path: pathlib.Path) -> None:
    names = imported_by(path)
    assert not top_level(names) & set.union(*FRAMEWORKS.values())
    assert not {name for name in names if name.startswith(("unified_ddp.torch", "unified_ddp.jax"))}


@pytest.mark.parametrize(("adapter", "path"), ADAPTERS, ids=lambda x: x.stem if isinstance(x, pathlib.Path) else x)
def test_adapters_never_import_each_other(adapter: str, path: pathlib.Path) -> None:
    other = "jax" if adapter == "torch" else "torch"
    names = imported_by(path)
    assert not top_level(names) & FRAMEWORKS[other]
    assert not {name for name in names if name.startswith((f"unified_ddp.{other}", "unified_ddp.cli"))}


@pytest.mark.parametrize("adapter", FRAMEWORKS)
def test_adapter_loads_one_framework(adapter: str) -> None:
    pytest.importorskip(adapter)
    other = "jax" if adapter == "torch" else "torch"
    done = run(f"import sys, unified_ddp.{adapter}\nassert {other!r} not in sys.modules")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("adapter", FRAMEWORKS)
def test_a_missing_framework_is_named(adapter: str) -> None:
    hide = f"import sys\nsys.modules[{adapter!r}] = None\n"
    done = run(hide + f"import unified_ddp\nimport unified_ddp.{adapter}")
    assert done.returncode != 0
    error = done.stderr.splitlines()[-1]
    assert "Error" in error
    assert f"unified-ddp[{adapter}]" in error.replace("_", "-")


def test_types_are_shipped() -> None:
    spec = importlib.util.find_spec("unified_ddp")
    assert spec is not None
    folders = [pathlib.Path(p) for p in spec.submodule_search_locations or []]
    for name in ("py.typed", "_core.pyi"):
        assert any((folder / name).exists() for folder in folders), name


def test_a_live_model_at_exit_warns_of_nothing() -> None:
    done = run(
        "import builtins\n"
        "from unified_ddp import ParamSpec, plan_in_ready_order\n"
        "from unified_ddp._core import Readiness\n"
        "plan = plan_in_ready_order([ParamSpec('a', [1], 'float32')], [1])\n"
        "builtins.kept = [plan, Readiness(['a'], [[0]], [False], print, print, print).hook(0)]"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
