"""Two processes of two CPU devices each, with collectives over gloo, against the oracle and hooks on the host.

What the processes run is in processes_shard_map.py, processes_pmap.py and processes_hooks.py.
"""

import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax_cases import assert_all_close, loss_fn, make_batch, make_params, oracle, shards
from processes_hooks import CASES, MAPPINGS
from step_cases import hook_params
from support.hook_cases import BUCKET_BYTES, HOOKS, STEPS, HostRanks, assert_close, gradients

from unified_ddp.jax import DistributedDataParallel
from unified_ddp.jax.comm_hooks.shared import layouts_of
from unified_ddp.plan import MIB

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
    worker = Path(__file__).with_name("processes_worker.py")
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    env["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # they compile much and compute little
    port, files = _free_port(), [folder / f"{rank}.pickle" for rank in range(PROCESSES)]
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
    return [pickle.loads(file.read_bytes()) for file in files]


def assert_gradients(results: list[dict[str, Any]], module: str, *keys: Any, tolerance: float | None = None) -> None:
    """On both replicas of both processes."""
    want = oracle(loss_fn, make_params(), make_batch(), 4)
    for result in results:
        grads = result[module]
        for key in keys:
            grads = grads[key]
        assert {len(leaf) for leaf in jax.tree.leaves(grads)} == {2}
        assert_all_close(grads, want, tolerance)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("strategy", ["flat", "tuple"])
def test_gradients_are_the_oracle(results: list[dict[str, Any]], strategy: str, check_vma: bool) -> None:
    assert_gradients(results, "processes_shard_map", "gradients", (strategy, check_vma))


@pytest.mark.parametrize("check_vma", [True, False])
def test_broadcast_from_a_replica_of_another_process(results: list[dict[str, Any]], check_vma: bool) -> None:
    for result in results:
        got = result["processes_shard_map"]["broadcast"][check_vma]
        assert got["w"].tolist() == [[1, 1, 1]] * 2
        assert got["n"].tolist() == [1, 1]
        assert got["on"].tolist() == [[True, False]] * 2
        assert got["half"].reshape(2, 2).tolist() == [[6, 7]] * 2


def test_flat_is_the_default_across_processes(results: list[dict[str, Any]]) -> None:
    assert [result["processes_shard_map"]["default_strategy"] for result in results] == ["flat", "flat"]


@pytest.mark.parametrize("where", [("processes_shard_map", True), ("processes_shard_map", False), ("processes_pmap",)])
def test_optax_updates_are_those_of_the_oracle(results: list[dict[str, Any]], where: tuple[Any, ...]) -> None:
    module, *check_vma = where
    want = jax.tree.map(lambda g: -2 * g, oracle(loss_fn, make_params(), make_batch(), 4))
    for result in results:
        updates = result[module]["optax"]
        assert_all_close(updates[check_vma[0]] if check_vma else updates, want)


@pytest.mark.parametrize("strategy", ["flat", "tuple"])
def test_pmap_gradients_are_the_oracle_and_losses_local(results: list[dict[str, Any]], strategy: str) -> None:
    assert_gradients(results, "processes_pmap", "gradients", strategy, 1)
    losses = np.concatenate([result["processes_pmap"]["gradients"][strategy][0] for result in results])
    want = [loss_fn(make_params(), shard) for shard in shards(make_batch(), 4)]
    np.testing.assert_allclose(losses, want, rtol=1e-5)


def test_pmap_reduces_accumulated_gradients_once(results: list[dict[str, Any]]) -> None:
    want = jax.tree.map(lambda g: 2 * g, oracle(loss_fn, make_params(), make_batch(), 4))
    for result in results:
        assert_all_close(result["processes_pmap"]["accumulated"], want)


def test_pmap_mean(results: list[dict[str, Any]]) -> None:
    for result in results:
        means = result["processes_pmap"]["mean"]
        assert {name: mean.tolist() for name, mean in means.items()} == {
            name: [0.5 if name == "bool" else 1.5] * 2 for name in means
        }
        assert len(means) == 7


@pytest.mark.parametrize(
    ("call", "source"), [(("broadcast_from", "flat"), 2), (("broadcast_from", "tuple"), 2), (("sync_buffers",), 0)]
)
def test_pmap_hands_on_one_replicas_values(results: list[dict[str, Any]], call: tuple[str, ...], source: int) -> None:
    """In the other process, or in this one, bit for bit and in their own types."""
    for result in results:
        got = result["processes_pmap"][call[0]]
        got = got[call[1]] if len(call) > 1 else got
        assert got.pop("key").tolist() == [[0, source]] * 2
        assert got.pop("bool").tolist() == [source % 2 == 1] * 2
        nan = got.pop("nan")
        assert np.isnan(nan).all() if source == 2 else np.signbit(nan).all()
        for name, values in got.items():
            assert str(values.dtype) == name
            assert values.tolist() == [source] * 2
        assert len(got) == 6


def test_pmap_without_the_axis_is_named(results: list[dict[str, Any]]) -> None:
    needs = "AxisError: DistributedDataParallel.value_and_grad needs the mapped axis 'data', but "
    for result in results:
        errors = result["processes_pmap"]["errors"]
        assert errors["unnamed"].startswith(needs + "no mapped axis in scope here has a name. Call it inside ")
        assert errors["other"].startswith(needs + "the mapped axes in scope here are 'batch'. Call it inside ")
        assert "axis_name='batch'" in errors["other"]
        assert errors["outside"].startswith(needs + "no mapped axis is in scope here. Call it inside ")


@pytest.mark.parametrize(("name", "mapping"), CASES)
def test_shared_hooks_by_hand_give_the_numbers_of_the_host(
    results: list[dict[str, Any]], name: str, mapping: str
) -> None:
    """State is each replica's own, and goes through numpy once."""
    hook, _, tolerance = HOOKS[name]
    host = HostRanks(hook, 4)
    layouts = layouts_of(DistributedDataParallel(hook_params(), bucket_cap_mb=BUCKET_BYTES / MIB).plan)
    for step in range(STEPS):
        wants = host.step(layouts, [gradients(step, replica) for replica in range(4)])
        for replica, want in enumerate(wants):
            got = results[replica // 2]["processes_hooks"]["shared"][name, mapping][step]
            assert_close(jax.tree.map(lambda g, own=replica % 2: g[own], got), want, tolerance)


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize(("hook", "tolerance"), [("compressed", 2e-2), ("gathered", 1e-5)])
def test_hook_functions_by_hand(results: list[dict[str, Any]], hook: str, tolerance: float, mapping: str) -> None:
    assert_gradients(results, "processes_hooks", "functions", (hook, mapping), tolerance=tolerance)
