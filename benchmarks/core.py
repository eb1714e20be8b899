"""What the core costs: planning, fingerprints, and the readiness tracker's share of each parameter's gradient.

Run by `make bench`. Times depend on the machine and on what else runs on it: compare within one run only.
"""

import statistics
import time
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from unified_ddp import BucketPlan, ParamSpec, bucket_caps, plan_in_ready_order, plan_to_json, schema_fingerprint
from unified_ddp.passes import Pass, PassKind
from unified_ddp.ranks.control import Control
from unified_ddp.ranks.progress import Progress
from unified_ddp.reducer import Reducer
from unified_ddp.usage import Usage

PARAMS = 100_000
HOOKS = 10_000
TORCH_PARAMS = 2_000


class NoBackend:
    """Packs, reduces and unpacks nothing, so that only the tracker and the pass are timed."""

    def begin(self, number: int, kind: PassKind, plan: BucketPlan) -> Pass:
        return Pass(number, kind, plan)

    def result(self) -> None: ...
    def pack_param(self, current: Pass, param: int) -> None: ...
    def pack(self, current: Pass, bucket: int) -> None: ...
    def launch(self, current: Pass, bucket: int) -> "NoBackend":
        return self

    def unpack(self, current: Pass, bucket: int, reduced: object, keep: set[int]) -> None: ...
    def end(self, current: Pass) -> None: ...


class OneRank:
    name, rank, world_size = "bench", 0, 1


def timed(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    kept = act()  # freed after the clock is read
    seconds = time.perf_counter() - start
    del kept
    return seconds


def add_row(table: Table, what: str, seconds: list[float], unit: str, scale: float) -> None:
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    values = (min(seconds), cuts[49], cuts[98])
    table.add_row(what, *(f"{value * scale:,.3f}" for value in values), unit)


def specs(count: int) -> list[ParamSpec]:
    return [ParamSpec(f"blocks.{i}.mlp.weight", [64, 64], "float32") for i in range(count)]


def bench_plan(table: Table, repeats: int = 30) -> None:
    params = specs(PARAMS)
    caps = bucket_caps()
    plan = plan_in_ready_order(params, caps)
    unit = "ms"
    cases: dict[str, Callable[[], object]] = {
        "plan_in_ready_order": lambda: plan_in_ready_order(params, caps),
        "plan.fingerprint": lambda: plan.fingerprint,
        "schema_fingerprint": lambda: schema_fingerprint(params),
    }
    for name, act in cases.items():
        act()
        add_row(table, name, [timed(act) for _ in range(repeats)], unit, 1e3)
    add_row(table, "plan_to_json", [timed(lambda: plan_to_json(plan)) for _ in range(3)], unit, 1e3)


def make_reducer(count: int) -> Reducer:
    plan = plan_in_ready_order(specs(count), bucket_caps())
    usage = Usage([p.name for p in plan.params], (), find_unused=False, static=False)
    progress = Progress(OneRank(), lambda: None)
    control = Control(lambda: None, progress)
    return Reducer(plan, NoBackend(), lambda: None, usage=usage, progress=progress, control=control)


def bench_hook(table: Table, repeats: int = 50) -> None:
    """Every parameter once a pass, each through its own hook; the loop's own cost is subtracted."""
    reducer = make_reducer(HOOKS)
    hooks = [reducer.hook(i) for i in reversed(range(HOOKS))]
    argument = object()

    def call_all(callables: list[Callable[[object], object]]) -> None:
        for call in callables:
            call(argument)

    def call_none(callables: list[Callable[[object], object]]) -> None:
        for _ in callables:
            pass

    costs: dict[str, list[float]] = {"hook": [], "loop": []}
    for _ in range(repeats):
        reducer.begin(arrival=bytes([1]) * HOOKS)
        costs["hook"].append(timed(lambda: call_all(hooks)))
        reducer.finish()
        costs["loop"].append(timed(lambda: call_none(hooks)))
    loop = statistics.median(costs["loop"])
    add_row(table, "hook, called in a loop", [c - loop for c in costs["hook"]], "ns/param", 1e9 / HOOKS)


def bench_torch(table: Table, repeats: int = 40) -> None:
    """Bare backward and backward with hooks take turns, so that both meet the same machine."""
    try:
        import torch
    except ImportError:
        table.add_row("hook in torch's backward", "-", "-", "-", "no torch here")
        return
    torch.set_num_threads(1)

    def make_params() -> list[torch.Tensor]:
        return [torch.ones(8, requires_grad=True) for _ in range(TORCH_PARAMS)]

    def backward(params: list[torch.Tensor]) -> float:
        loss = torch.cat(params).sum()
        return timed(loss.backward)

    bare, hooked = make_params(), make_params()
    reducer = make_reducer(TORCH_PARAMS)
    for index, param in enumerate(hooked):
        param.register_post_accumulate_grad_hook(reducer.hook(index))
    costs: dict[str, list[float]] = {"bare": [], "hooked": []}
    for _ in range(repeats):
        costs["bare"].append(backward(bare))
        reducer.begin(arrival=bytes([1]) * TORCH_PARAMS)
        costs["hooked"].append(backward(hooked))
        reducer.finish()
    difference = [b - a for a, b in zip(costs["bare"], costs["hooked"], strict=True)]
    per_param = 1e9 / TORCH_PARAMS
    add_row(table, "torch backward, bare", costs["bare"], "ns/param", per_param)
    add_row(table, "torch backward, with hooks", costs["hooked"], "ns/param", per_param)
    add_row(table, "torch backward, difference", difference, "ns/param", per_param)


def main() -> None:
    table = Table("what", "min", "p50", "p99", "unit", title=f"unified_ddp core; {PARAMS:,} parameters in a plan")
    for column in table.columns[1:4]:
        column.justify = "right"
    bench_plan(table)
    bench_hook(table)
    bench_torch(table)
    Console().print(table)


if __name__ == "__main__":
    main()
