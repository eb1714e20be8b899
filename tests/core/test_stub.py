import ast
import importlib.util
import pathlib

from unified_ddp import _core

# nanobind's own, and what every Python class has.
IGNORED = {"__module__", "__doc__", "__init__", "__new__", "__repr__", "__abstractmethods__", "__weakref__", "__dict__"}


def _stub() -> ast.Module:
    spec = importlib.util.find_spec("unified_ddp")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    paths = [pathlib.Path(p) / "_core.pyi" for p in spec.submodule_search_locations]
    return ast.parse(next(path for path in paths if path.exists()).read_text())


def _names(body: list[ast.stmt]) -> set[str]:
    names = {node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    assigned = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    return names | {target.id for target in assigned if isinstance(target, ast.Name)}


def test_stub_names_what_the_module_has() -> None:
    assert _names(_stub().body) == {name for name in vars(_core) if not name.startswith("__")}


def test_stub_names_what_each_class_has() -> None:
    for node in _stub().body:
        if not isinstance(node, ast.ClassDef) or node.name == "Phase" or node.name.endswith("Error"):
            continue
        attributes = {name for name in vars(getattr(_core, node.name)) if not name.startswith("_nb")}
        assert _names(node.body) - IGNORED == attributes - IGNORED, node.name
    assert {phase.name for phase in _core.Phase} == {"IDLE", "ARMED", "ACTIVE"}


def test_everything_native_has_a_docstring() -> None:
    for name in (n for n in vars(_core) if not n.startswith("__")):
        thing = getattr(_core, name)
        assert thing.__doc__, name
        public = [a for a in vars(thing) if not a.startswith("_")] if type(thing).__name__ == "nb_type" else []
        assert all(getattr(thing, a).__doc__ for a in public), name
