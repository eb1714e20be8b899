"""train_step in two processes of two CPU devices each, started by torchrun."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax_cases import loss_fn, make_params
from step_cases import assert_same, batches, hook_wants, line_search_steps, plain_steps
from support.hook_cases import HOOKS, SHAPES
from support.torchrun import torchrun

pytestmark = pytest.mark.timeout(300)

PROCESSES = 2
WORKER = Path(__file__).parents[1] / "step_worker.py"
CASES = (
    "trains",
    "line_search",
    "hooks",
    "keys_and_weights",
    "mismatches",
    "uneven",
    "different",
    "without_store",
    "not_finite",
    "stalls",
)


def run(folder: Path, devices: int, cases: tuple[str, ...], **env: str) -> dict[str, Any]:
    """What each process wrote, by case."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    torchrun(WORKER, str(folder), *cases, env={"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"} | env)
    found = {c: [json.loads((folder / f"{c}.{r}.json").read_text()) for r in range(PROCESSES)] for c in cases}
    return found | {"replicas": PROCESSES * devices}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The processes run once for all tests; those of one device are compiled as users' are."""
    return run(tmp_path_factory.mktemp("two_devices"), 2, CASES, JAX_DISABLE_MOST_OPTIMIZATIONS="1")


@pytest.fixture(scope="module", params=[2, 1], ids=["2devices", "1device"])
def each(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """With one device, XLA computes in the thread that dispatches, which a stall then holds."""
    if request.param == 2:
        return request.getfixturevalue("results")
    return run(tmp_path_factory.mktemp("one_device"), 1, ("trains", "stalls"))


def _assert_named(got: dict[str, Any], want: Any, tolerance: float) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(want):
        value = np.array(got[jax.tree_util.keystr(path, simple=True, separator=".")]).reshape(leaf.shape)
        np.testing.assert_allclose(value, leaf, atol=tolerance * np.max(np.abs(leaf), initial=0), rtol=0)


def test_trains_as_one_process_would(each: dict[str, Any]) -> None:
    """With the params of process 0, of every dtype."""
    params = make_params()
    want, losses = plain_steps(loss_fn, params, optax.adamw(0.01), batches(3, 16), 2 * each["replicas"])
    for result in each["trains"]:
        np.testing.assert_allclose(result["losses"], losses, rtol=1e-5)
        _assert_named(result["params"], want, 2e-5)
        assert result["key"] == jax.random.key_data(jax.random.key(0)).tolist()
        assert result["n"] == 0
    assert each["trains"][0] == each["trains"][1]


def test_line_search_sees_the_loss_of_all_processes(results: dict[str, Any]) -> None:
    params = make_params()
    want, losses = line_search_steps(loss_fn, params, optax.lbfgs(), batches(3, 16), results["replicas"])
    for result in results["line_search"]:
        np.testing.assert_allclose(result["losses"], losses, rtol=1e-3)
        _assert_named(result["params"], want, 1e-3)
        assert result["error"].startswith("UnevenDataError: step 3: processes gave batches or arguments that differ")
    assert results["line_search"][0] == results["line_search"][1]


@pytest.mark.parametrize("name", ["powersgd", "topk"])
def test_comm_hooks_with_state(results: dict[str, Any], name: str) -> None:
    want = hook_wants(HOOKS[name][0], results["replicas"], 3)
    for result in results["hooks"]:
        got = {leaf: np.array(values).reshape(SHAPES[leaf]) for leaf, values in result[name].items()}
        assert_same(got, want, 1e-4)
    assert results["hooks"][0] == results["hooks"][1]


def test_a_process_that_does_not_come_is_named(each: dict[str, Any]) -> None:
    errors = each["stalls"][0]
    assert errors["init"].startswith("StallError: process 1 did not come to train_step's init within 2 s")
    assert (
        "step 1 (the calls of this process, from 0), has not ended within 4 s: process 1 has not come" in errors["step"]
    )
    assert errors["step"].startswith("StallError: train_step ")


def test_a_process_without_data_and_keys_by_replica(results: dict[str, Any]) -> None:
    rng = jax.random.fold_in(jax.random.key(5), 0)
    x = np.asarray(batches(1, 8)[0]["x"])[:3, 0]
    noise = [float(jax.random.normal(jax.random.fold_in(rng, replica), ())) for replica in range(2)]
    for result in results["keys_and_weights"]:
        np.testing.assert_allclose(result["loss"], (2 * noise[0] + noise[1]) / 3, rtol=1e-5)
        np.testing.assert_allclose(result["aux"], x.mean(), rtol=1e-5)


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        (
            "parameters",
            ["parameter number 6 is 'scale' on process 0, 'more' on process 1", "8 parameters on process 0"],
        ),
        ("shape", ["the shape of parameter 'scale' is [1] on process 0, [2] on process 1"]),
        ("options", ["different options: accumulate is '1' on process 0, '2' on process 1"]),
        ("buckets", ["different options: plan is "]),
        ("comm_hook", ["ratio=0.1)' on process 0", "ratio=0.2)' on process 1"]),
        ("trainable", ["the trainable of parameter 'scale' is True on process 0, False on process 1"]),
        ("optimizer", ["different options: optimizer_state is ", "mu.dense1.kernel: [3, 5]", "'()' on process 1"]),
        ("buffers", ["buffer number 0 is absent on process 0, 'mean' on process 1"]),
    ],
)
def test_every_process_names_the_first_difference(results: dict[str, Any], case: str, parts: list[str]) -> None:
    for result in results["mismatches"]:
        assert result[case].startswith("ConstructionMismatchError: processes ")
        for part in parts:
            assert part in result[case]


def test_uneven_data_is_refused_in_every_process(results: dict[str, Any]) -> None:
    loss = float(loss_fn(make_params(), batches(1, 16)[0]))
    for result in results["uneven"]:
        assert result["error"].startswith("UnevenDataError: step 0: processes gave batches or arguments that differ: ")
        assert "x: [4, 3]" in result["error"].split(" on process 0, ")[0]
        assert "x: [8, 3]" in result["error"].split(" on process 0, ")[1]
        assert "pad_batch" in result["error"]
        np.testing.assert_allclose(result["loss after it"], loss, rtol=1e-5)


@pytest.mark.parametrize(
    ("case", "sides"),
    [
        ("weight", ["y: [8, 1] float32)", "y: [8, 1] float32, weight: [8] float32)"]),
        ("rng", ["y: [8, 1] float32)", "y: [8, 1] float32, rng)"]),
        ("static", ["train=True)", "train=False)"]),
        ("dtype", ["y: [8, 1] float32)", "y: [8, 1] int32)"]),
        ("step", ["step is 0", "5"]),
        ("params", ["params.dense1.bias was restored with checksum ", ""]),
    ],
)
def test_other_calls_and_states_are_refused_in_every_process(
    results: dict[str, Any], case: str, sides: list[str]
) -> None:
    loss = float(loss_fn(make_params(), batches(1, 16)[0]))
    restored = case in ("step", "params")
    what = "ReplicaMismatchError: step {}: processes gave states" if restored else "UnevenDataError: step {}: processes"
    for result in results["different"]:
        error = result[case]
        assert error.startswith(tuple(what.format(step) for step in range(6))), error
        first, second = error.split(" on process 0, ")
        assert sides[0] in first
        assert sides[1] in second.split(" on process 1")[0]
        assert "State is unchanged" in second
        np.testing.assert_allclose(result["loss after them"], loss, rtol=1e-5)


def test_gradients_that_are_not_finite_are_named_in_every_process(results: dict[str, Any]) -> None:
    for result in results["not_finite"]:
        assert result["error"].startswith("NonFiniteError: step 0: gradients are not finite: 'dense1.bias', ")
        assert "on replica 3 (process 1). State is unchanged" in result["error"]


def test_a_jax_that_hides_its_store_gathers_by_collectives(results: dict[str, Any]) -> None:
    for result in results["without_store"]:
        assert result["texts"] == ["\u00e9", "\u00e9\u00e9"]
        assert "accumulate is '1' on process 0, '2' on process 1" in result["error"]
