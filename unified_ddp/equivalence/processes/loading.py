"""A side from FILE.py:FUNCTION: the file is run as Python runs a script, and the function makes the side."""

import ast
import importlib.util
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unified_ddp.equivalence.errors import EquivalenceError
from unified_ddp.equivalence.side import Side

_MADE_BY = {"TorchSide": "torch", "JaxSide": "jax"}


@dataclass(frozen=True)
class Program:
    """Where a side comes from.

    Attributes:
        path: of a Python file.
        function: its name there; called without arguments, it returns a side, or a side and a list of batches.
    """

    path: Path
    function: str

    @staticmethod
    def parse(text: str) -> "Program":
        """Returns the program that a text such as "torch_side.py:make" names.

        Raises:
            EquivalenceError: it is no such text, there is no such file, or it has no such function.
        """
        name, colon, function = text.rpartition(":")
        if not colon or not function.isidentifier() or not name:
            raise EquivalenceError(
                f"{text}: give FILE.py:FUNCTION, such as torch_side.py:make, or a directory of `record`"
            )
        path = Path(name)
        if not path.is_file():
            raise EquivalenceError(f"{text}: there is no file {path.absolute()}")
        program = Program(path.absolute(), function)
        names = program._defined()
        if names and function not in names:
            raise EquivalenceError(f"{text}: {path} defines no '{function}'; it has {', '.join(sorted(names)[:8])}")
        return program

    def __str__(self) -> str:
        return f"{self.path.name}:{self.function}"

    def framework(self) -> str:
        """Returns the framework of which the file makes sides, "" if its text does not tell."""
        used = {node.id for node in ast.walk(self._tree()) if isinstance(node, ast.Name)}
        used |= {node.attr for node in ast.walk(self._tree()) if isinstance(node, ast.Attribute)}
        found = {framework for name, framework in _MADE_BY.items() if name in used}
        return found.pop() if len(found) == 1 else ""

    def make(self) -> tuple[Side, list[Any] | None]:
        """Runs the file and the function, and returns the side and its batches.

        Raises:
            EquivalenceError: either raises, or returns something else; the text has the lines of the user's file.
        """
        folder = str(self.path.parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        try:
            module = self._module()
            made = getattr(module, self.function)()
        except EquivalenceError:
            raise
        except Exception as error:
            raise EquivalenceError(f"{self} raised {own_lines(error, self.path)}") from error
        side, batches = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not all(hasattr(side, name) for name in ("framework", "evaluate", "tensors", "values")):
            raise EquivalenceError(
                f"{self} returned {_kind(made)}; it returns a TorchSide or a JaxSide, or a pair (side, list of batches)"
            )
        if batches is not None and not isinstance(batches, Sequence):
            raise EquivalenceError(
                f"{self} returned batches that are {_kind(batches)}; give a list, such as "
                "list(itertools.islice(batches, 2))"
            )
        return side, None if batches is None else list(batches)

    def _module(self) -> Any:
        name = self.path.stem
        spec = importlib.util.spec_from_file_location(name, self.path)
        if spec is None or spec.loader is None:
            raise EquivalenceError(f"{self.path} is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # processes that the side starts find its functions by this name
        spec.loader.exec_module(module)
        return module

    def _tree(self) -> ast.Module:
        try:
            return ast.parse(self.path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, OSError) as error:
            raise EquivalenceError(f"{self.path} cannot be read as Python: {error}") from error

    def _defined(self) -> set[str]:
        """Returns the names at the top of the file; empty if an import with * hides them."""
        names: set[str] = set()
        for node in self._tree().body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                if any(alias.name == "*" for alias in node.names):
                    return set()
                names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            else:
                names |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
                names |= {n.name for n in ast.walk(node) if isinstance(n, ast.FunctionDef)}
        return names


def own_lines(error: BaseException, path: Path) -> str:
    """Returns an error with the lines of its traceback, from the user's file on."""
    entries = traceback.extract_tb(error.__traceback__)
    start = next((i for i, entry in enumerate(entries) if Path(entry.filename) == path), 0)
    shown = entries[start:] if len(entries) - start <= 8 else [*entries[start : start + 3], *entries[-4:]]
    lines = [f"    {entry.filename}:{entry.lineno} in {entry.name}: {entry.line or ''}" for entry in shown]
    return "\n".join([f"{type(error).__name__}: {error}", *lines])


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)} ({', '.join(type(item).__name__ for item in value[:4])})"
    return "None" if value is None else f"a {type(value).__name__}"
