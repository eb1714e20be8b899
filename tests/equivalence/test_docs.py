"""The first example of docs/equivalence.md runs as it stands."""

import re
import sys
import types
from pathlib import Path

from support.zoo import cnn

from unified_ddp.equivalence import RUNGS

TEXT = (Path(__file__).parents[2] / "docs" / "equivalence.md").read_text()


def test_the_first_example_says_what_the_page_says(monkeypatch, capsys) -> None:
    models = types.ModuleType("my_models")
    models.TorchNet, models.JaxNet = cnn.TorchCnn, cnn.JaxCnn
    monkeypatch.setitem(sys.modules, "my_models", models)
    code, shown = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", TEXT, re.DOTALL).groups()
    exec(compile(code, "docs/equivalence.md", "exec"), {"__name__": "docs"})
    assert verdicts(capsys.readouterr().out) == verdicts(shown)
    assert len([line for line in code.splitlines() if line.strip()]) <= 15


def verdicts(text: str) -> list[str]:
    """Returns the first line, and of each rung's its name and verdict: the numbers are those of a machine."""
    first, *lines = text.splitlines()
    return [first, *(" ".join(line.split()[:2]) for line in lines if line.split()[:1] and line.split()[0] in RUNGS)]
