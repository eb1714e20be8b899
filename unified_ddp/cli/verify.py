"""`unified-ddp verify`: the self-test."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from unified_ddp.cli.common import EXIT_FAILED, could_not_run
from unified_ddp.equivalence.demo.config import Dtype, Fault, Side, VerifyConfig, VerifyError


def verify(
    world_size: Annotated[int, typer.Option(help="Ranks on each side.")] = VerifyConfig.world_size,
    steps: Annotated[int, typer.Option(help="Training steps.")] = VerifyConfig.steps,
    dtype: Annotated[Dtype, typer.Option(help="Of parameters, data and gradients.")] = VerifyConfig.dtype,
    tolerance: Annotated[
        float | None,
        typer.Option(help="k: a difference may be k times the tensor's largest value. [1e-5; float64 1e-13]"),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Images of each rank in a step.")] = VerifyConfig.batch_size,
    bucket_cap_mb: Annotated[float, typer.Option(help="Bucket cap in MiB.")] = VerifyConfig.bucket_cap_mb,
    learning_rate: Annotated[float, typer.Option(help="Of SGD with momentum 0.9.")] = VerifyConfig.learning_rate,
    seed: Annotated[int, typer.Option(help="Of weights and shards.")] = VerifyConfig.seed,
    timeout: Annotated[
        float, typer.Option(help="Seconds without progress until the run is given up.")
    ] = VerifyConfig.timeout,
    inject: Annotated[Fault | None, typer.Option(help="Break something on purpose; it must be caught.")] = None,
    inject_into: Annotated[Side | None, typer.Option(help="The side to break. [torch]")] = None,
    inject_bucket: Annotated[int | None, typer.Option(help="The bucket to break. [1]")] = None,
    inject_rank: Annotated[
        int | None, typer.Option(help="The rank at fault, for stale-rank, die and hang. [the last]")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the whole report there.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write loss curves and differences there, as PNG.")] = None,
) -> None:
    """Trains one small net in torch and JAX, in lockstep, and compares their reduced gradients.

    The data are scikit-learn's 1,797 handwritten digits. Exit status: 0 every gradient is inside the tolerance, 1 one
    is not, 2 the run could not be carried out.
    """
    console = Console()
    with could_not_run():
        config = VerifyConfig(
            world_size=world_size,
            steps=steps,
            dtype=dtype,
            tolerance=tolerance,
            batch_size=batch_size,
            bucket_cap_mb=bucket_cap_mb,
            learning_rate=learning_rate,
            seed=seed,
            timeout=timeout,
            inject=inject,
            inject_into=inject_into,
            inject_bucket=inject_bucket,
            inject_rank=inject_rank,
        )
        _check_output("--json", json_file)
        _check_output("--plot", plot, suffix=".png")
        ok = _verify(config, console, json_file, plot)
    raise typer.Exit(0 if ok else EXIT_FAILED)


def _verify(config: VerifyConfig, console: Console, json_file: Path | None, plot: Path | None) -> bool:
    from unified_ddp.equivalence.demo.report import plot_losses, print_report, report_to_dict
    from unified_ddp.equivalence.demo.run import run_verify

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=config.steps)
        report = run_verify(config, lambda phase, done: bar.update(task, description=phase, completed=done))
    print_report(report, console)
    if json_file is not None:
        _write(json_file, json.dumps(report_to_dict(report), indent=2, allow_nan=False))
    if plot is not None:
        plot_losses(report, plot)
    return report.ok


def _check_output(option: str, path: Path | None, suffix: str | None = None) -> None:
    """Refuses before the run what could not be written after it."""
    if path is None:
        return
    if not path.absolute().parent.is_dir():
        raise VerifyError(f"{option} {path}: the folder {path.absolute().parent} does not exist; create it first")
    if suffix is not None and path.suffix != suffix:
        raise VerifyError(f"{option} {path}: give a file that ends in {suffix}")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise VerifyError(f"--json {path}: {error}") from error
