"""Children that die or hang: a named error, status 2, and nothing left running."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from equivalence.verify_cli import COMMAND, QUICK_COMPILE, run_verify

LINUX = sys.platform == "linux"


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    state = Path(f"/proc/{pid}/stat")
    return LINUX and state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z"


def wait_until(holds, seconds=60.0) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)
    return holds()


def assert_named_and_gone(outcome, names):
    pids = [int(pid) for pid in re.findall(r"\(pid (\d+)\)", outcome.error)]
    assert len(pids) == names
    assert all(is_gone(pid) for pid in pids)
    assert not outcome.report


@pytest.mark.timeout(300)
def test_a_rank_that_dies_is_named(tmp_path):
    outcome = run_verify(tmp_path, "--steps", "3", "--inject", "die", "--inject-rank", "0", environment=QUICK_COMPILE)
    assert outcome.status == 2, outcome.out + outcome.error
    assert "could not run: torch rank 0 (pid" in outcome.error
    assert "ended with status 86 before it was done; the end of its output:" in outcome.error
    assert "injected fault: torch rank 0 will die at step 1" in outcome.error


@pytest.mark.timeout(300)
def test_a_process_that_hangs_ends_the_run_with_every_stack(tmp_path):
    outcome = run_verify(tmp_path, "--steps", "2", "--inject", "hang", "--inject-into", "jax", "--timeout", "8")
    assert outcome.status == 2, outcome.out + outcome.error
    assert "no progress for 8 seconds" in outcome.error
    assert_named_and_gone(outcome, names=3)


@pytest.mark.timeout(120)
@pytest.mark.skipif(not LINUX, reason="finds children in /proc")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_child_outlives_its_parent(tmp_path, how):
    parent = subprocess.Popen(
        [*COMMAND],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},  # a killed parent leaves its folder behind
    )
    listing = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    try:
        assert wait_until(lambda: len(listing.read_text().split()) == 3)
        children = [int(pid) for pid in listing.read_text().split()]
        parent.send_signal(how)
        assert parent.wait(60) != 0
        assert wait_until(lambda: all(is_gone(pid) for pid in children))
    finally:
        parent.kill()
        parent.wait()


@pytest.mark.timeout(300)
def test_a_bucket_that_does_not_exist_is_refused(tmp_path):
    options = ("--steps", "1", "--inject", "sum", "--inject-bucket", "2", "--bucket-cap-mb", "25")
    outcome = run_verify(tmp_path, *options)
    assert outcome.status == 2
    assert "--inject-bucket 2: the plan has only bucket 0" in outcome.error
