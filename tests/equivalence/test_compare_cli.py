"""`compare`, `record`, `map` and `show`: verdicts, exit statuses, named errors, and no process left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from equivalence.report_cases import REPORTS
from equivalence.test_verify_processes import is_gone, wait_until

from unified_ddp.equivalence import Report

HERE = Path(__file__).parent / "sides"
SIDE = str(HERE / "numpy_side.py")
COMMAND = [sys.executable, "-P", "-m", "unified_ddp.cli"]


def run(*arguments, timeout=120, **more):
    done = subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=timeout, **more)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def compare(first, second, *more):
    return run("compare", f"{SIDE}:{first}", f"{SIDE}:{second}", *more)


def test_equal_sides_pass_and_every_report_is_written(tmp_path):
    files = [tmp_path / f"report{suffix}" for suffix in (".json", ".html", ".png")]
    reports = [word for file in files for word in ("--report", file)]
    done = compare("first", "second", "--until", "reduced", *reports)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("PASS")
    assert all(file.stat().st_size > 1000 for file in files)
    report = Report.from_json(files[0].read_text())
    assert report.ok
    assert [rung.name for rung in report.rungs] == ["outputs", "loss", "gradients", "reduced"]
    shown = run("show", files[0])
    assert (shown.returncode, shown.stdout) == (0, done.stdout.partition("written")[0])


@pytest.mark.parametrize(
    ("second", "until", "rung", "text"),
    [
        ("tripled", "gradients", "loss", "3 times the other at every step"),
        ("summed", "reduced", "reduced", "2 ranks, so a sum over ranks for a mean"),
    ],
)
def test_what_differs_is_named_with_status_1(second, until, rung, text):
    done = compare("first", second, "--until", until, "--no-power")
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("DIFFERS")
    assert f"Worst of {rung}" in done.stdout
    assert text in " ".join(done.stdout.split())


def test_without_a_terminal_there_is_a_line_a_phase():
    done = compare("first", "second", "--no-power")
    phases = [line.split(" s ", 1)[1].strip() for line in done.stderr.splitlines()]
    assert phases[0] == "starting numpy_side.py:first"
    assert len(phases) == len(set(phases)) < 8


@pytest.mark.parametrize(
    ("first", "second", "texts"),
    [
        ("second", "second", ["numpy_side.py:second gives no batches", "(side, batches)"]),
        ("first", "with_other_batches", ["numpy_side.py:with_other_batches gives batches of its own"]),
        ("with_a_generator", "second", ["batches that are a generator", "itertools.islice"]),
        ("with_an_object", "second", ["numpy_side.py:with_an_object", "['x'] is a object", "numpy arrays"]),
        ("nothing", "second", ["numpy_side.py:nothing returned None"]),
        (
            "raises",
            "second",
            ["numpy_side.py:raises raised KeyError: 'no such checkpoint'", "numpy_side.py:", "in raises"],
        ),
        ("refuses", "second", ["the checkpoint has no weights for 'dense'"]),
        ("dies", "second", ["numpy_side.py:dies (pid", "ended with status 7", "out of memory"]),
        ("divides", "second", ["numpy_side.py:divides, in evaluate, raised ZeroDivisionError", "<lambda>"]),
        ("dies_later", "second", ["numpy_side.py:dies_later (pid", "ended with status 9"]),
        ("absent", "second", ["defines no 'absent'; it has"]),
    ],
)
def test_a_side_that_cannot_be_run_is_named_with_status_2(first, second, texts):
    done = compare(first, second, "--no-power")
    assert done.returncode == 2, done.stdout
    assert "could not run: " in done.stderr
    assert not [text for text in texts if text not in done.stderr], done.stderr
    assert not done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nowhere.py:make", f"{SIDE}:second"], "nowhere.py:make: there is no file"),
        ([SIDE, f"{SIDE}:second"], "give FILE.py:FUNCTION"),
        ([HERE, f"{SIDE}:second"], "is a directory, but no record"),
        ([f"{SIDE}:first", f"{SIDE}:second", "--until", "end"], "--until end: give one of outputs, loss"),
        ([f"{SIDE}:first", f"{SIDE}:second", "--dtype", "int8"], "--dtype int8: give one of float32"),
        ([f"{SIDE}:first", f"{SIDE}:second", "--ranks", "0"], "--ranks 0: give at least 1"),
        ([f"{SIDE}:first", f"{SIDE}:second", "--jax-python", "no-python"], "--jax-python no-python: there is no such"),
        (
            [f"{SIDE}:first", f"{SIDE}:second", "--jax-python", "false"],
            "--jax-python false: fails; install unified_ddp",
        ),
        ([f"{SIDE}:first", f"{SIDE}:second", "--jax-python", sys.executable], "names neither or both of TorchSide"),
        ([f"{SIDE}:first", f"{SIDE}:second", "--mapping", "no.toml"], "--mapping no.toml: there is no such file"),
        ([f"{SIDE}:first", f"{SIDE}:second", "--layout", "x"], "--layout 'x': give NAME=VALUE"),
        (
            [f"{SIDE}:first", f"{SIDE}:second", "--report", "report.pdf"],
            "give a file that ends in .json, .html or .png",
        ),
        ([f"{SIDE}:first", f"{SIDE}:second", "--report", "/no/such/x.json"], "the folder /no/such does not exist"),
    ],
)
def test_bad_input_is_named_with_status_2(arguments, text):
    done = run("compare", *arguments)
    assert done.returncode == 2
    assert text in done.stderr


def test_a_side_that_hangs_is_named_with_its_stack():
    done = compare("hangs", "second", "--timeout", "3")
    assert done.returncode == 2
    assert "numpy_side.py:hangs (pid" in done.stderr
    assert "did not answer in 3 seconds (evaluate)" in done.stderr
    assert 'numpy_side.py", line' in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="reads the processes' output through /proc")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_outlives_the_command(tmp_path, how):
    log = tmp_path / "started"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [*COMMAND, "compare", f"{SIDE}:hangs_with_a_child", f"{SIDE}:second"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=log.open("wb"))

    def pids():
        texts = [path.read_text() for path in tmp_path.glob("unified-ddp-*/*.log")]
        words = [line.split() for text in texts for line in text.splitlines() if line.startswith("started")]
        return [int(pid) for found in words for pid in (found[1], found[3])]

    try:
        assert wait_until(lambda: len(pids()) == 2 and "comparing" in log.read_text())
        found = pids()
        process.send_signal(how)
        process.wait(30)
        assert wait_until(lambda: all(map(is_gone, found)), 20)
    finally:
        process.kill()
        process.wait()


def test_recorded_sides_give_the_verdict_without_running(tmp_path):
    source = tmp_path / "own_side.py"
    source.write_text(Path(SIDE).read_text())
    settings = ["--until", "reduced", "--ranks", "4", "--seed", "5"]
    assert run("record", f"{source}:first", tmp_path / "a", *settings).returncode == 0
    done = run("record", f"{source}:tripled", tmp_path / "b", "--first", tmp_path / "a")
    assert done.returncode == 0, done.stderr
    assert run("record", f"{source}:second", tmp_path / "c", "--first", tmp_path / "a").returncode == 0
    source.unlink()
    passed = run("compare", tmp_path / "a", tmp_path / "c", "--report", tmp_path / "r.json")
    assert passed.returncode == 0, passed.stdout + passed.stderr
    report = Report.from_json((tmp_path / "r.json").read_text())
    assert (report.until, report.ranks, report.seed) == ("reduced", 4, 5)
    assert any("recorded" in note for note in report.notes)
    assert run("compare", tmp_path / "a", tmp_path / "b").returncode == 1
    other = run("compare", tmp_path / "a", tmp_path / "c", "--seed", "6")
    assert other.returncode == 2
    assert "--seed 6: the record was made with 5" in other.stderr
    later = run("record", f"{SIDE}:first", tmp_path / "d", "--until", "curve")
    assert later.returncode == 2
    assert "Record until reduced at most" in later.stderr
    again = run("record", f"{SIDE}:first", tmp_path / "a")
    assert again.returncode == 2
    assert "exists" in again.stderr


def test_a_record_is_compared_with_a_side_that_runs(tmp_path):
    assert run("record", f"{SIDE}:first", tmp_path / "a").returncode == 0
    assert run("compare", tmp_path / "a", f"{SIDE}:second").returncode == 0
    assert run("compare", tmp_path / "a", f"{SIDE}:tripled").returncode == 1


def test_a_record_of_other_questions_says_so(tmp_path):
    assert run("record", f"{SIDE}:first", tmp_path / "a").returncode == 0
    for answer in (tmp_path / "a" / "answers").iterdir():
        answer.unlink()
    done = run("compare", tmp_path / "a", f"{SIDE}:second")
    assert done.returncode == 2
    assert "has no answer to what this comparison asks (" in done.stderr


def test_map_prints_and_writes_the_mapping(tmp_path):
    file = tmp_path / "mapping.toml"
    done = run("map", f"{SIDE}:first", f"{SIDE}:second", "--write", file)
    assert done.returncode == 0, done.stderr
    assert file.read_text() == done.stdout
    assert '"dense.weight" = "dense.weight"' in done.stdout
    assert compare("first", "second", "--mapping", file, "--no-power").returncode == 0
    file.write_text(done.stdout.replace('"dense.bias"', '"dense.offset"'))
    stale = compare("first", "second", "--mapping", file)
    assert stale.returncode == 2
    assert "dense.offset" in stale.stderr


@pytest.mark.parametrize(("name", "status"), [("pass", 0), ("gradients", 1), ("precision", 1)])
def test_show_has_the_status_of_the_comparison(tmp_path, name, status):
    file = tmp_path / "report.json"
    file.write_text(REPORTS[name].to_json())
    assert run("show", file).returncode == status


@pytest.mark.parametrize("text", ["", "{}", json.dumps({"format": "other"})])
def test_show_refuses_what_is_no_report(tmp_path, text):
    file = tmp_path / "report.json"
    file.write_text(text)
    done = run("show", file)
    assert done.returncode == 2
    assert str(file) in done.stderr


def test_each_framework_runs_under_its_own_python(tmp_path):
    """Two interpreters that tell of themselves: each starts this one, and notes that it was started."""
    pythons = {}
    for name in ("torch", "jax"):
        python = tmp_path / f"{name}-python"
        python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path / name}\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        pythons[name] = python
    began = time.monotonic()
    done = run(
        "compare",
        f"{HERE / 'torch_side.py'}:make",
        f"{HERE / 'jax_side.py'}:make",
        *("--torch-python", pythons["torch"], "--jax-python", pythons["jax"], "--no-power"),
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.split()[0] == "0.0", time.monotonic() - began
    assert "torch_side.py make" in (tmp_path / "torch").read_text()
    assert "jax_side.py make" in (tmp_path / "jax").read_text()
    assert "torch 2" in done.stdout
    assert "jax 0" in done.stdout
