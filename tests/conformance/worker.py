"""Runs cases one by one; started by `pool`, not by hand.

Each line of stdin is a case's id; the results file (the first argument) gets one JSON a line for the start of this
worker and for the end of each case. The substitution runs at import, so that processes started by spawn, which import
this file again before they unpickle a test class, get it too.
"""

import importlib
import json
import os
import sys
import time
import traceback
import unittest
from typing import Any

from conformance import substitution

substitution.install()


def fork_ranks() -> None:
    """Starts ranks by fork: they then have everything imported, which takes 15 s a case off.

    This process runs no collective and no autograd itself, so there is nothing to break.
    """
    import torch.multiprocessing
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    def spawn_processes(self: Any) -> None:
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    MultiProcessTestCase._spawn_processes = spawn_processes  # type: ignore[method-assign]


def strict_exit_codes() -> None:
    """Fails a case if a signal ended any of its ranks; torch looks only at rank 0 for that."""
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    torchs = MultiProcessTestCase._check_return_codes

    def check(self: Any, fn: Any, elapsed_time: Any) -> None:
        torchs(self, fn, elapsed_time)
        if fn in self.skip_return_code_checks or fn in self.special_return_code_checks:
            return
        ended = {rank: p.exitcode for rank, p in enumerate(self.processes) if (p.exitcode or 0) < 0}
        if ended:
            raise RuntimeError(f"ranks ended by a signal (rank: exit code): {ended}")

    MultiProcessTestCase._check_return_codes = check  # type: ignore[method-assign]


def one_timeout() -> None:
    """Only DISTRIBUTED_TESTS_DEFAULT_TIMEOUT, which `pool` sets, limits a case."""
    from torch.testing._internal import common_distributed

    common_distributed.TIMEOUT_OVERRIDE.clear()


def run_case(case_id: str) -> tuple[str, str]:
    """Runs one case. Returns its status (pass, fail, skip, xfail, timeout or missing) and what there is to say."""
    _, group, name = case_id.split(":")
    class_name, test = name.split(".")
    cls = getattr(importlib.import_module(f"conformance.{group}_suite"), class_name)
    if not hasattr(cls, test):
        return "missing", f"{class_name} has no {test}"
    result = unittest.TestResult()
    cls.setUpClass()
    try:
        cls(test).run(result)
    finally:
        cls.tearDownClass()
    if result.failures or result.errors:
        detail = "\n".join(text for _, text in result.failures + result.errors)
        return ("timeout" if "terminated or timed out after" in detail else "fail"), detail
    if result.skipped:
        return "skip", "; ".join(text for _, text in result.skipped)
    if result.unexpectedSuccesses:
        return "fail", "unexpected success"
    return ("xfail" if result.expectedFailures else "pass"), ""


def main() -> None:
    with open(sys.argv[1], "a") as results:

        def tell(**record: Any) -> None:
            results.write(json.dumps(record) + "\n")
            results.flush()

        fork_ranks()
        strict_exit_codes()
        one_timeout()
        environment = dict(os.environ)
        tell(event="ready")
        for line in sys.stdin:
            case_id = line.strip()
            for name in set(os.environ) - set(environment):
                del os.environ[name]
            os.environ.update(environment)
            began = time.monotonic()
            try:
                status, detail = run_case(case_id)
            except unittest.SkipTest as skip:
                status, detail = "skip", str(skip)
            except BaseException:
                status, detail = "error", traceback.format_exc()
            seconds = round(time.monotonic() - began, 2)
            tell(event="end", id=case_id, status=status, seconds=seconds, detail=detail[-6000:])


if __name__ == "__main__":
    main()
