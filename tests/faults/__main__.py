"""`python -m faults [--torch] [--only TEXT] [--json FILE]`: the table, with our class or with torch's."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from support.world import World

from faults.judge import judge
from faults.table import load


def main(
    torch: Annotated[bool, typer.Option(help="run torch's own class instead of ours")] = False,
    only: Annotated[str, typer.Option(help="rows whose kind or name holds this")] = "",
    file: Annotated[Path | None, typer.Option("--json", help="write the outcomes there")] = None,
) -> None:
    """Runs every row and prints how it ended; exits with 1 if our class fails one."""
    console = Console(width=None if Console().is_terminal else 160)
    table = Table("kind", "scenario", "expected", "outcome", title="torch's class" if torch else "unified_ddp.torch")
    worlds: dict[int, World] = {}
    outcomes = {}
    try:
        for row in load().values():
            if only not in f"{row.kind}: {row.name}":
                continue
            outcome = judge(row, worlds.setdefault(row.ranks, World(row.ranks)), torchs=torch)
            outcomes[row.name] = {"kind": row.kind, "right": outcome.right, "text": outcome.text}
            first = outcome.text.splitlines()[0][:200] if outcome.text else ""
            mark = "ok  " if outcome.right else "FAIL"
            console.print(f"{mark} {row.kind}: {row.name}", markup=False, highlight=False)
            if not outcome.right:
                console.print(f"     {first}", markup=False, highlight=False)
            shown = Text("right") if outcome.right else Text(first, style="red")
            table.add_row(row.kind, Text(row.name), row.expected, shown)
    finally:
        for world in worlds.values():
            world.stop()
    if file is not None:
        file.write_text(json.dumps(outcomes, indent=1))
    console.print(table)
    for kind in dict.fromkeys(o["kind"] for o in outcomes.values()):
        rights = [o["right"] for o in outcomes.values() if o["kind"] == kind]
        console.print(f"{kind}: {rights.count(False)} of {len(rights)} rows fail")
    failed = sum(not o["right"] for o in outcomes.values())
    console.print(f"{failed} of {len(outcomes)} rows fail")
    raise typer.Exit(1 if failed and not torch else 0)


typer.run(main)
