"""`unified-ddp compare`, `record`, `map` and `show`: sides of the user's own."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from unified_ddp.cli import options
from unified_ddp.cli.common import EXIT_COULD_NOT_RUN, EXIT_FAILED, could_not_run
from unified_ddp.cli.sides import AnySide, batches_of, opened, pythons, recorded_settings, sources
from unified_ddp.equivalence.errors import EquivalenceError
from unified_ddp.equivalence.pair import Pair
from unified_ddp.equivalence.processes.recording import RECORDABLE, RecordedSide, Recorder, write_record
from unified_ddp.equivalence.processes.remote import RemoteSide
from unified_ddp.equivalence.report.progress import showing_progress
from unified_ddp.equivalence.report.saving import check_path
from unified_ddp.equivalence.report.terminal import print_report
from unified_ddp.equivalence.reporting import Report

_LOG_WIDTH = 100
"""Of a report that goes to no terminal."""
_TIMEOUT = 600.0

First = Annotated[
    str, typer.Argument(help="FILE.py:FUNCTION that returns (side, batches), or a directory of `record`.")
]
Second = Annotated[str, typer.Argument(help="FILE.py:FUNCTION that returns a side, or a directory of `record`.")]


def compare(
    first: First,
    second: Second,
    until: options.Until = None,
    ranks: options.Ranks = None,
    steps: options.Steps = None,
    dtype: options.Dtype = None,
    weights: options.Weights = None,
    seed: options.Seed = None,
    power: Annotated[bool, typer.Option(help="Look for tensors of which nothing that is compared tells.")] = True,
    mapping: options.MappingFile = None,
    layout: options.Layout = None,
    rename: options.Rename = None,
    rule: options.Rules = None,
    tied: options.Tied = None,
    ignore: options.Ignore = None,
    torch_python: options.TorchPython = None,
    jax_python: options.JaxPython = None,
    timeout: options.Timeout = _TIMEOUT,
    report: options.Reports = None,
) -> None:
    """Compares two programs that are to be one model, each in a process of its own.

    Exit status: 0 they agree on every rung, 1 they differ, 2 the comparison could not be carried out.
    """
    with could_not_run():
        for path in report or []:
            check_path(path)
        told = options.PairOptions(mapping, layout or [], rename or [], rule or [], tied or [], ignore or [])
        found = sources(first, second)
        recorded = recorded_settings(found)
        given = {"until": until, "ranks": ranks, "steps": steps, "dtype": dtype, "weights": weights, "seed": seed}
        settings = options.chosen_settings(recorded, **given)
        interpreters = pythons(found, torch_python, jax_python)
        with (
            showing_progress(Console(stderr=True)) as tell,
            opened(found, interpreters, settings["ranks"], timeout, tell) as sides,
        ):
            arguments = {**told.for_pair(), **_paired_as(sides[1])}
            pair = Pair(sides[0], sides[1], batches_of(sides), seed=settings["seed"], **arguments)
            checked = pair.check(**_for_check(settings), power=power and recorded is None, progress=tell)
        if recorded is not None and power:
            note = "tensors of which nothing tells were not looked for: a recorded side cannot be run on others"
            checked = replace(checked, notes=(*checked.notes, note))
        _show(checked, report or [])
    raise typer.Exit(_status(checked))


def record(
    side: Annotated[str, typer.Argument(help="FILE.py:FUNCTION that returns (side, batches), or a side with --first.")],
    directory: Annotated[Path, typer.Argument(help="Where the record goes; must not exist.")],
    first: Annotated[
        Path | None,
        typer.Option(help="The first side's record: then SIDE is the second, given its weights and batches."),
    ] = None,
    until: options.Until = None,
    ranks: options.Ranks = None,
    steps: options.Steps = None,
    dtype: options.Dtype = None,
    weights: options.Weights = None,
    seed: options.Seed = None,
    mapping: options.MappingFile = None,
    layout: options.Layout = None,
    rename: options.Rename = None,
    rule: options.Rules = None,
    tied: options.Tied = None,
    ignore: options.Ignore = None,
    timeout: options.Timeout = _TIMEOUT,
) -> None:
    """Runs one side and keeps its answers, for a comparison with one that runs on another machine.

    First `record torch_side.py:make A`; then, where A was copied to, `record jax_side.py:make B --first A`; then
    `compare A B` wherever both are.
    """
    with could_not_run():
        if directory.exists():
            raise EquivalenceError(f"{directory} exists; give a directory that does not")
        told = options.PairOptions(mapping, layout or [], rename or [], rule or [], tied or [], ignore or [])
        found = sources(side, *([] if first is None else [str(first)]))
        if not isinstance(found[0], RecordedSide) and first is not None and not isinstance(found[1], RecordedSide):
            raise EquivalenceError(f"--first {first}: give a directory that `record` wrote")
        given = {"until": until, "ranks": ranks, "steps": steps, "dtype": dtype, "weights": weights, "seed": seed}
        settings = options.chosen_settings(recorded_settings(found[1:]), **given)
        if settings["until"] not in RECORDABLE:
            raise EquivalenceError(
                f"--until {settings['until']}: an update gives both optimizers one set of gradients, which takes two "
                f"sides that run. Record until {RECORDABLE[-1]} at most"
            )
        with (
            showing_progress(Console(stderr=True)) as tell,
            opened(found[:1], pythons(found[:1], None, None), settings["ranks"], timeout, tell) as (own,),
        ):
            pair = _pair_to_record(own, found[1:], directory, settings["seed"], told)
            pair.check(**_for_check(settings), power=False, progress=tell)
            if first is not None:
                pair.mapping.save(directory / "mapping.toml")
                (directory / "pair.json").write_text(json.dumps({"layout": pair.layout}))
            write_record(directory, own, pair.batches, settings)
        typer.echo(f"{directory}: {len(list((directory / 'answers').iterdir()))} answers of the {own.framework} side")


def _pair_to_record(own: AnySide, first: list[Any], directory: Path, seed: int, told: options.PairOptions) -> Pair:
    """Returns the pair whose check asks the side all that will be asked of it."""
    if first:
        batches = batches_of([*first, own])
        arguments = told.for_pair()
        return Pair(first[0], Recorder(own, directory), batches, seed=seed, **arguments)
    if told != options.PairOptions():
        raise EquivalenceError(
            "--mapping, --layout, --rename, --rule, --tied and --ignore go with --first: they concern a pair"
        )
    from unified_ddp.equivalence.mapping.mapping import Mapping, Source

    batches = batches_of([own])
    recorder = Recorder(own, directory)
    itself = Mapping({t.name: (Source(t.name, buffer=t.buffer),) for t in own.tensors()}, {})
    return Pair(recorder, recorder, batches, seed=seed, mapping=itself)


def map_(
    first: First,
    second: Second,
    write: Annotated[Path | None, typer.Option(help="Write the mapping there (TOML), to be reviewed and kept.")] = None,
    layout: options.Layout = None,
    rename: options.Rename = None,
    rule: options.Rules = None,
    tied: options.Tied = None,
    ignore: options.Ignore = None,
    torch_python: options.TorchPython = None,
    jax_python: options.JaxPython = None,
    timeout: options.Timeout = _TIMEOUT,
) -> None:
    """Finds which tensors of one side make which of the other, and prints it.

    Exit status: 0 every tensor has its counterpart, 2 one has none, and the text says what to add.
    """
    with could_not_run():
        if write is not None and not write.absolute().parent.is_dir():
            raise EquivalenceError(f"--write {write}: the folder {write.absolute().parent} does not exist")
        told = options.PairOptions(None, layout or [], rename or [], rule or [], tied or [], ignore or [])
        found = sources(first, second)
        with (
            showing_progress(Console(stderr=True)) as tell,
            opened(found, pythons(found, torch_python, jax_python), 1, timeout, tell) as sides,
        ):
            tell("mapping", 0, 1)
            pair = Pair(sides[0], sides[1], batches_of(sides), **told.for_pair())
            text = pair.mapping.to_toml()
        typer.echo(text, nl=False)
        if pair.mapping_note:
            typer.echo(f"# {pair.mapping_note}")
        if write is not None:
            pair.mapping.save(write)


def show(
    file: Annotated[Path, typer.Argument(help="A report that was written as .json.")],
    report: options.Reports = None,
) -> None:
    """Shows a report that was written as JSON, and writes it in other forms.

    Exit status: as `compare` had.
    """
    with could_not_run():
        for path in report or []:
            check_path(path)
        try:
            found = Report.from_json(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise EquivalenceError(f"{file} cannot be read: {error}") from error
        except EquivalenceError as error:
            raise EquivalenceError(f"{file}: {error}") from error
        _show(found, report or [])
    raise typer.Exit(_status(found))


def _for_check(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name != "seed"}


def _paired_as(second: AnySide) -> dict[str, Any]:
    """Returns how a recorded second side was paired."""
    if isinstance(second, RemoteSide) or not (second.directory / "pair.json").exists():
        return {}
    told = json.loads((second.directory / "pair.json").read_text())
    return {**told, "mapping": second.directory / "mapping.toml"}


def _show(report: Report, paths: list[Path]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_LOG_WIDTH)
    print_report(report, console)
    for path in paths:
        report.save(path)
        typer.echo(f"written: {path}")


def _status(report: Report) -> int:
    if report.ok:
        return 0
    return EXIT_FAILED if report.first_failure is not None else EXIT_COULD_NOT_RUN
