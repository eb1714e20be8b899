"""Runs `unified-ddp verify` as a user does, and reads its JSON."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-m", "unified_ddp.cli", "verify"]
LIMIT_SECONDS = 240
# Halves what XLA spends on compiling; for runs whose numbers are not the point.
QUICK_COMPILE = {"XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"}


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    error: str
    report: dict[str, Any]


def run_verify(directory: Path, *options: str, environment: Mapping[str, str] | None = None) -> Outcome:
    """The report is empty if none was written."""
    file = directory / "report.json"
    done = subprocess.run(
        [*COMMAND, "--json", str(file), *options],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        cwd=directory,
        env={**os.environ, **(environment or {})},
    )
    report = json.loads(file.read_text()) if file.exists() else {}
    return Outcome(done.returncode, done.stdout, done.stderr, report)
