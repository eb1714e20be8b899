"""The same comm hook, plan and gradients in torch, over gloo ranks, and in JAX."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

from support.hook_cases import BUCKET_BYTES, HOOKS, STEPS, assert_close  # noqa: E402

from unified_ddp.plan import MIB, plan_from_json, plan_to_json  # noqa: E402

SIZE = 2


def make_model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(20, 16), torch.nn.Tanh(), torch.nn.Linear(16, 12), torch.nn.Linear(12, 1)
    )


def gradients(step: int, rank: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng([step, rank])
    return {name: random.normal(size=p.shape).astype(np.float32) for name, p in make_model().named_parameters()}


def case_torch(rank: int, world_size: int, name: str) -> tuple[str, list[dict[str, np.ndarray]]]:
    """Returns the plan, and each step's gradients."""
    from unified_ddp.torch import DistributedDataParallel, HookState, shared_hook

    class Linear(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def forward(self, wanted: dict[str, np.ndarray]) -> Any:
            return sum((p * torch.tensor(wanted[n])).sum() for n, p in self.model.named_parameters())

    # looking for unused parameters keeps the first plan
    ddp = DistributedDataParallel(Linear(), bucket_cap_mb_list=[BUCKET_BYTES / MIB], find_unused_parameters=True)
    ddp.register_comm_hook(HookState(HOOKS[name][0]), shared_hook)
    results = []
    for step in range(STEPS):
        ddp.zero_grad()
        ddp(gradients(step, rank)).backward()
        results.append({n: p.grad.numpy().copy() for n, p in ddp.module.model.named_parameters()})
    return plan_to_json(ddp.plan), results


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", ["fp16", "topk", "quantize8", "powersgd", "powersgd cold qr"])
def test_same_numbers_in_torch_and_jax(world: Callable[[int], Any], name: str) -> None:
    import jax.numpy as jnp

    from unified_ddp.jax import DistributedDataParallel

    plan, from_torch = world(SIZE).run(case_torch, name=name)[0]
    hook, k, _ = HOOKS[name]

    names = list(gradients(0, 0))
    params = {f"model.{n}": jnp.zeros(g.shape) for n, g in gradients(0, 0).items()}
    ddp = DistributedDataParallel(params, plan=plan_from_json(plan), comm_hook=hook)

    def step(grads: Any, state: Any) -> Any:
        return ddp.all_reduce(grads, hook_state=state)

    mapped = jax.jit(jax.vmap(step, axis_name="data"))
    state = ddp.init_hook_state(SIZE)
    for i in range(STEPS):
        grads = {f"model.{n}": np.stack([gradients(i, rank)[n] for rank in range(SIZE)]) for n in names}
        reduced, state = mapped(grads, state)
        assert_close({n: reduced[f"model.{n}"][0] for n in names}, from_torch[i], k)
