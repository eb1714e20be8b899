"""Steps that cannot be taken, or are not to be: named, and the state stays as it was."""

import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax_cases import loss_fn, make_batch, make_params
from step_cases import assert_same, make_step

from unified_ddp.errors import NonFiniteError, ReplicaMismatchError, UnevenDataError
from unified_ddp.jax.step import reports

pytestmark = pytest.mark.timeout(120)


def _spoilt(row: int) -> Any:
    """Divides by zero in one row: the gradients of what comes after it are not finite."""
    batch = make_batch()
    return batch | {"y": batch["y"].at[row].set(jnp.inf)}


def test_skip_leaves_everything_on_all_replicas() -> None:
    params = make_params()
    step = make_step(params, _counting, 4, optax.adam(0.1), on_nonfinite="skip")
    state, _ = step(step.init(params, jnp.int32(0)), make_batch())
    after, loss = step(state, _spoilt(5))
    assert not jnp.isfinite(loss)
    for name in ("params", "opt_state", "buffers"):
        assert_same(getattr(after, name), getattr(state, name), 0)
    assert (int(after.step), int(after.skipped)) == (2, 1)
    again, _ = step(after, make_batch())
    assert (int(again.buffers), int(again.skipped)) == (2, 1)
    assert bool(jnp.all(jnp.isfinite(again.params["scale"])))


def _counting(params: Any, batch: Any, buffers: Any) -> Any:
    return loss_fn(params, batch), buffers + 1


@pytest.mark.parametrize("accumulate", [1, 2])
def test_raise_names_parameters_and_replica(accumulate: int) -> None:
    params = make_params()
    step = make_step(params, loss_fn, 4, on_nonfinite="raise", accumulate=accumulate)
    state = step.init(params)
    batch = make_batch() if accumulate == 1 else jax.tree.map(lambda x: jnp.tile(x, (2, 1)), make_batch())
    state, _ = step(state, batch)
    spoilt = batch | {"y": batch["y"].at[5 * accumulate].set(jnp.inf)}
    with pytest.raises(
        NonFiniteError, match=r"step 1: .*'dense1\.bias'.* and \d more on replica 2\. State is unch"
    ) as e:
        step(state, spoilt)
    assert "replica 1" not in str(e.value)
    step(state, batch)


def test_raise_tells_a_sum_that_overflowed() -> None:
    params = {"w": jnp.ones(2)}
    step = make_step(params, lambda p, b: 6e4 * (p["w"].sum() * b.mean()), 4, reduce_dtype=jnp.float16)
    assert not jnp.isfinite(step(step.init(params), jnp.full(4, 5.0))[0].params["w"]).any()
    step = make_step(
        params, lambda p, b: 6e4 * (p["w"].sum() * b.mean()), 4, reduce_dtype=jnp.float16, on_nonfinite="raise"
    )
    with pytest.raises(NonFiniteError, match="'w' in the mean over replicas, though on no replica: the sum overflowed"):
        step(step.init(params), jnp.full(4, 5.0))


def test_ignore_hands_it_to_the_optimizer() -> None:
    params = make_params()
    step = make_step(params, loss_fn, 2)
    state, _ = step(step.init(params), _spoilt(0))
    assert not jnp.isfinite(state.params["scale"])


def _judge(monkeypatch: pytest.MonkeyPatch, texts: list[str], checks: dict[str, Any], **options: Any) -> None:
    gathered = SimpleNamespace(all_gather_text=lambda text: texts)
    monkeypatch.setattr(reports, "ProcessGathering", lambda what, timeout: gathered)
    ended = reports.Dispatched(None, {name: jnp.asarray(value) for name, value in checks.items()}, "", {})
    reports.Reports(("w",), SimpleNamespace(timeout=1, **options)).judge(3, ended)


@pytest.mark.parametrize(("donate", "unchanged"), [(False, "State is unchanged. "), (True, "")])
def test_what_differed_between_processes(monkeypatch: pytest.MonkeyPatch, donate: bool, unchanged: str) -> None:
    told = re.escape(
        "a on process 0, b on process 1. " + unchanged + "Drop the remainder, or fill every process's batch"
    )
    with pytest.raises(UnevenDataError, match=f"^step 3: processes gave batches or arguments that differ: {told}"):
        _judge(monkeypatch, ["a", "b"], {"uneven": True, "apart": True, "step": 0}, donate=donate)
    held = ['{"step": 1, "params.w": 5}', '{"step": 1}']
    told = "params.w was restored with checksum 5 on process 0, not restored on process 1. " + unchanged
    with pytest.raises(
        ReplicaMismatchError, match=f"^step 3: processes gave states that differ: {told}Restore the same"
    ):
        _judge(monkeypatch, held, {"uneven": False, "apart": True, "step": 1}, donate=donate)
    _judge(monkeypatch, held, {"uneven": False, "apart": False, "step": 1}, donate=donate)
