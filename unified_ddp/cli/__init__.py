"""The command line. Loads neither framework itself, so that `--help` answers at once and without them.

verify           the self-test: one small net in torch and JAX
compare          compare, record, map, show: sides of the user's own
sides, options   how `compare` and its kin come to their sides, and what they are told
common           exit statuses, and how a run ends that could not be carried out
"""

from typing import Annotated

import typer

from unified_ddp import __version__
from unified_ddp.cli.compare import compare, map_, record, show
from unified_ddp.cli.verify import verify

__all__ = ["app", "main"]

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(verify)
app.command()(compare)
app.command()(record)
app.command("map")(map_)
app.command()(show)


def main() -> None:
    """Runs `unified-ddp`."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True)] = False,
) -> None:
    """One distributed-data-parallel layer for PyTorch and JAX."""
