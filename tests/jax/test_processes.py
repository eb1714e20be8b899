"""Two processes of two CPU devices each, with collectives over gloo, against the oracle."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax_cases import assert_all_close, loss_fn, make_batch, make_params, oracle

pytestmark = pytest.mark.timeout(240)

PROCESSES = 2


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process wrote; the processes run once for all tests."""
    folder = tmp_path_factory.mktemp("processes")
    worker = Path(__file__).with_name("process_worker.py")
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    port, files = _free_port(), [folder / f"{rank}.npz" for rank in range(PROCESSES)]
    processes, logs = [], [folder / f"{rank}.log" for rank in range(PROCESSES)]
    try:
        for rank in range(PROCESSES):
            command = [sys.executable, str(worker), str(port), str(rank), str(PROCESSES), str(files[rank])]
            with logs[rank].open("w") as log:
                processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
        for process, log in zip(processes, logs, strict=True):
            assert process.wait(timeout=200) == 0, log.read_text()[-3000:]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    return [dict(np.load(file)) for file in files]


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("strategy", ["flat", "tuple"])
def test_gradients_are_the_oracle(results: list[dict[str, Any]], strategy: str, check_vma: bool) -> None:
    params = make_params()
    want = oracle(loss_fn, params, make_batch(), 4)
    for result in results:
        grads = {
            jax.tree_util.keystr(path, simple=True, separator="."): None
            for path, _ in jax.tree_util.tree_leaves_with_path(params)
        }
        grads = {name: result[f"{strategy}/{check_vma}/{name}"] for name in grads}
        assert all(len(grad) == 2 for grad in grads.values())
        assert_all_close(jax.tree.unflatten(jax.tree.structure(params), list(grads.values())), want)


@pytest.mark.parametrize("check_vma", [True, False])
def test_broadcast_from_a_replica_of_another_process(results: list[dict[str, Any]], check_vma: bool) -> None:
    for result in results:
        got = {name: result[f"broadcast/{check_vma}/{name}"] for name in ("w", "n", "on", "half")}
        assert got["w"].tolist() == [[1, 1, 1]] * 2
        assert got["n"].tolist() == [1, 1]
        assert got["on"].tolist() == [[True, False]] * 2
        assert got["half"].reshape(2, 2).tolist() == [[6, 7]] * 2


def test_flat_is_the_default_across_processes(results: list[dict[str, Any]]) -> None:
    assert [str(result["default_strategy"]) for result in results] == ["flat", "flat"]
