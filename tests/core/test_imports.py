"""csrc_shared <- unified_ddp._core <- unified_ddp <- the adapters <- command line and tests; no circle anywhere."""

import ast
import functools
import graphlib
import importlib.util
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FRAMEWORKS = {"torch": {"torch", "torchvision"}, "jax": {"jax", "jaxlib", "flax", "optax"}}
# Where each house lies in the repository, and as installed.
HOUSES = {
    "core": ("unified_ddp", "unified_ddp"),
    "torch": ("adapters/torch", "unified_ddp.torch"),
    "jax": ("adapters/jax", "unified_ddp.jax"),
}
# A process of its own, which loads one adapter when it knows which side it is.
CHOOSES_ITS_SIDE = {"unified_ddp.equivalence.demo.worker"}


def modules_of(house: str) -> dict[str, pathlib.Path]:
    """Returns the modules of a house under the names that they are installed with."""
    folder, package = HOUSES[house]
    paths = sorted((ROOT / folder).rglob("*.py"))
    parts = [(package, *path.relative_to(ROOT / folder).with_suffix("").parts) for path in paths]
    return {".".join(part).removesuffix(".__init__"): path for part, path in zip(parts, paths, strict=True)}


MODULES = {house: modules_of(house) for house in HOUSES}
EVERY = {name: path for modules in MODULES.values() for name, path in modules.items()}
CORE = list(MODULES["core"])
ADAPTERS = [(house, module) for house in FRAMEWORKS for module in MODULES[house]]


@functools.cache
def imported_by(module: str) -> frozenset[str]:
    """Returns the modules that a module imports: within functions, and for types alone, too."""
    names = set()
    for node in ast.walk(ast.parse(EVERY[module].read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively; give the full name"
            inner = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            names |= {full if full in EVERY else str(node.module) for full in inner.values()}
    return frozenset(names)


def top_level(names: frozenset[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def within(names: frozenset[str], *packages: str) -> list[str]:
    return sorted(n for n in names if any(n == package or n.startswith(f"{package}.") for package in packages))


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120)


def circle(graph: dict[str, set[str]]) -> str:
    """Returns a circle in words; empty if there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return " <- ".join(error.args[1])
    return ""


@pytest.mark.parametrize("house", HOUSES)
def test_no_circle_of_modules(house: str) -> None:
    """A package's `__init__` runs before its modules, and is an import of theirs only if they name it."""
    found = circle({module: set(imported_by(module)) & MODULES[house].keys() for module in MODULES[house]})
    assert not found, f"modules import each other, be it within functions or for types alone: {found}"


@pytest.mark.parametrize("house", HOUSES)
def test_no_circle_of_folders(house: str) -> None:
    """The modules that lie in the house itself stand for themselves."""
    package = HOUSES[house][1]

    def folder(module: str) -> str:
        rest = module.removeprefix(package).split(".")
        path = MODULES[house][module]
        return f"{package}.{rest[1]}/" if len(rest) > 2 or (len(rest) == 2 and path.name == "__init__.py") else module

    graph: dict[str, set[str]] = {}
    for module in MODULES[house]:
        others = {folder(name) for name in imported_by(module) if name in MODULES[house]}
        graph.setdefault(folder(module), set()).update(others - {folder(module)})
    found = circle(graph)
    assert not found, f"folders import each other, be it within functions or for types alone: {found}"


def test_core_loads_no_framework() -> None:
    modules = [module for module in CORE if not module.endswith(".__main__")]
    code = f"import sys, {', '.join(modules)}\nassert not {{'torch', 'jax', 'flax'}} & set(sys.modules)"
    done = run(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", CORE)
def test_core_names_no_framework(module: str) -> None:
    names = imported_by(module)
    assert not top_level(names) & set.union(*FRAMEWORKS.values())
    assert bool(within(names, "unified_ddp.torch", "unified_ddp.jax")) == (module in CHOOSES_ITS_SIDE)


@pytest.mark.parametrize("module", CORE)
def test_equivalence_stands_above_the_core(module: str) -> None:
    """What reduces knows nothing of what compares, nor of the command line."""
    above = ("unified_ddp.cli", "unified_ddp.equivalence", "unified_ddp.testing")
    if not within(frozenset({module}), *above):
        assert not within(imported_by(module), "unified_ddp.equivalence", "unified_ddp.cli")


@pytest.mark.parametrize(("adapter", "module"), ADAPTERS)
def test_adapters_never_import_each_other(adapter: str, module: str) -> None:
    other = "jax" if adapter == "torch" else "torch"
    names = imported_by(module)
    assert not top_level(names) & FRAMEWORKS[other]
    assert not within(names, f"unified_ddp.{other}", "unified_ddp.cli")
    if not module.startswith(f"unified_ddp.{adapter}.equivalence"):
        assert not within(names, "unified_ddp.equivalence", f"unified_ddp.{adapter}.equivalence")


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
