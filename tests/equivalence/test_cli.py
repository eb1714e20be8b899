"""The command line without any training."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from unified_ddp.cli import app
from unified_ddp.equivalence.demo.config import Dtype, Fault, Side, VerifyConfig


def test_help_loads_neither_framework():
    code = (
        "import sys\nsys.argv = ['unified-ddp', 'verify', '--help']\n"
        "from unified_ddp.cli import main\n"
        "try: main()\nexcept SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'jax', 'flax', 'sklearn', 'matplotlib'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--inject" in done.stdout


def test_version():
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.strip()[0].isdigit()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--world-size", "0"], "--world-size 0: give at least 1"),
        (["--steps", "0"], "--steps 0: give at least 1"),
        (["--batch-size", "1"], "--batch-size 1: batch norm needs"),
        (["--bucket-cap-mb", "-1"], "--bucket-cap-mb -1.0: give a positive number"),
        (["--tolerance", "0"], "--tolerance 0.0: give a positive number"),
        (["--tolerance", "nan"], "--tolerance nan: give a positive number"),
        (["--inject", "sum", "--world-size", "1"], "--world-size 1: one rank alone"),
        (["--inject", "stale-rank", "--steps", "1"], "--steps 1: a stale gradient needs a step before"),
        (["--inject", "stale-rank", "--inject-rank", "2"], "--inject-rank 2: ranks are 0 to 1"),
        (["--inject-bucket", "1"], "--inject-bucket 1: give --inject, too"),
        (["--inject-rank", "0"], "--inject-rank 0: give --inject, too"),
        (["--inject-into", "torch"], "--inject-into torch: give --inject, too"),
        (["--inject", "sum", "--inject-bucket", "-1"], "--inject-bucket -1: buckets count from 0"),
        (["--learning-rate", "0"], "--learning-rate 0.0: give a positive number"),
        (["--timeout", "inf"], "--timeout inf: give a positive number of seconds"),
        (["--seed", "-1"], "--seed -1: give 0 or more"),
        (["--json", "/no/such/folder/x.json"], "--json /no/such/folder/x.json: the folder /no/such/folder"),
        (["--plot", "losses.nonsense"], "--plot losses.nonsense: give a file that ends in .png"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(options, message):
    result = CliRunner().invoke(app, ["verify", *options])
    assert result.exit_code == 2
    assert message in result.stderr


def test_the_job_survives_json():
    config = VerifyConfig(dtype=Dtype.FLOAT64, inject=Fault.SUM, inject_into=Side.JAX, inject_rank=1)
    again = VerifyConfig.from_json(json.dumps(json.loads(config.to_json())))
    assert again == config
    assert again.k == 1e-13
    assert VerifyConfig.from_json(VerifyConfig().to_json()).inject is None
