"""Command line: `python -m conformance` with `tests` on the path; see `--help`."""

import argparse
import json
import re
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from conformance.pool import Plan, Result, run_cases

_STATUSES = ("pass", "fail", "timeout", "error", "skip", "xfail", "missing")


def arguments() -> argparse.Namespace:
    """Returns the parsed command line."""
    parser = argparse.ArgumentParser(prog="conformance", description="Runs torch's own DDP tests on a class.")
    parser.add_argument("--impl", default="unified_ddp.torch:DistributedDataParallel", help="module:Class under test")
    parser.add_argument("--setup", default="conformance.refuse_torchs:install", help="called in every process; or ''")
    parser.add_argument("--only", default="", help="regular expression on the case's id")
    parser.add_argument("--timeout", type=int, default=100, help="seconds a case")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--retries", type=int, default=0, help="run a case that did not pass again, up to N times")
    parser.add_argument("--out", type=Path, default=Path("build/conformance.json"))
    parser.add_argument("--list", action="store_true", help="print the ids and do nothing")
    return parser.parse_args()


def table(results: list[Result]) -> Table:
    """Returns the counts by mode and suite."""
    counts: dict[str, Counter[str]] = {}
    seconds: dict[str, float] = {}
    for result in results:
        suite = " ".join(result.id.split(":")[:2])
        counts.setdefault(suite, Counter())[result.status] += 1
        seconds[suite] = seconds.get(suite, 0.0) + result.seconds
    total = sum(counts.values(), Counter())
    statuses = [s for s in _STATUSES if s in ("pass", "fail") or total[s]]
    found = Table("mode and suite", *statuses, "seconds", title="PyTorch's own DDP tests")
    found.columns[0].no_wrap = True
    for column in found.columns[1:]:
        column.justify = "right"
    for suite, count in sorted(counts.items()):
        found.add_row(suite, *(str(count[s]) for s in statuses), f"{seconds[suite]:.0f}")
    found.add_section()
    found.add_row("all", *(str(total[s]) for s in statuses), f"{sum(seconds.values()):.0f}")
    return found


def main() -> int:
    """Runs the accepted cases; returns 1 if any does not pass."""
    args = arguments()
    console = Console()
    accepted = json.loads(Path(__file__).with_name("accepted.json").read_text())
    ids = [i for i in accepted["tests"] if re.search(args.only, i)]
    if args.list:
        print(*ids, sep="\n")
        return 0
    plan = Plan(args.impl, args.setup, args.timeout, args.jobs, args.retries)
    results: list[Result] = []
    began = time.monotonic()

    def report(result: Result) -> None:
        results.append(result)
        print(f"[{len(results)}/{len(ids)}] {result.status:8s} {result.seconds:6.1f} s  {result.id}", flush=True)

    run_cases(plan, ids, report)
    seconds = round(time.monotonic() - began, 1)
    data = asdict(plan) | {"seconds": seconds, "results": {r.id: asdict(r) for r in results}}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(data, indent=1) + "\n")
    bad = [r for r in results if not r.good]
    for result in bad:
        console.rule(f"{result.status}: {result.id}")
        print(result.detail[-2000:])
    console.print(table(results))
    print(f"{len(results) - len(bad)} of {len(ids)} pass with {args.impl} in {seconds:.0f} s; details in {args.out}")
    return 1 if bad or len(results) < len(ids) or not ids else 0


if __name__ == "__main__":
    sys.exit(main())
