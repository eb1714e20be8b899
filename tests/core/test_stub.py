"""The stub, made of the native module when it is built, lies beside it and says enough."""

import ast
import pathlib

import pytest

from unified_ddp import _core

STUB = ast.parse(pathlib.Path(_core.__file__).with_name("_core.pyi").read_text())
CLASSES = [node for node in STUB.body if isinstance(node, ast.ClassDef)]


def public(thing: object) -> set[str]:
    return {name for name in vars(thing) if not name.startswith("_")}


def names(body: list[ast.stmt]) -> set[str]:
    found = {node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    assigned = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    return found | {target.id for target in assigned if isinstance(target, ast.Name)}


def test_it_names_what_the_module_has() -> None:
    assert names(STUB.body) == public(_core)
    for node in CLASSES:
        members = {name for name in names(node.body) if not name.startswith("_")}
        assert members == public(getattr(_core, node.name)), node.name


@pytest.mark.parametrize("node", CLASSES, ids=lambda node: node.name)
def test_classes_and_their_members_have_docstrings(node: ast.ClassDef) -> None:
    assert ast.get_docstring(node)
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and (not member.name.startswith("_") or member.name == "__init__"):
            assert ast.get_docstring(member), member.name


@pytest.mark.parametrize(
    "function", [node for node in ast.walk(STUB) if isinstance(node, ast.FunctionDef)], ids=lambda node: node.name
)
def test_types_are_told(function: ast.FunctionDef) -> None:
    arguments = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
    told = [ast.unparse(a.annotation) for a in arguments if a.arg != "self" and a.annotation]
    assert len(told) == len([a for a in arguments if a.arg != "self"])
    assert function.returns is not None
    told.append(ast.unparse(function.returns))
    vague = {"object", "tuple", "list", "dict", "Callable", "collections.abc.Callable"}
    assert not [text for text in told if text in vague or "std::" in text or "Any" in text] or function.name == "__eq__"
