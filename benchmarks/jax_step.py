"""What a data-parallel step costs in JAX: ours, a `psum` for each leaf in shard_map, and plain `jit` of a split batch.

One process with two CPU devices, then two processes with one each, over gloo. They take turns, step by step and
compilation by compilation, so that all meet the same machine; compilation is from tracing to the executable. Ratios of
medians are held against the goals. Those of minima are printed as well, and those of the CPU time of compilation, as
other load moves them less; so is a shard_map that reduces nothing ("bare"): no reduction can be faster. `--check` makes
a missed goal an error.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

VARIANTS = ("ours", "leaf", "jit", "bare")
# Of one process: ours against the better of the other two. Of two: ours against `psum` a leaf.
GOALS = {
    1: {name: {"step": 1.03, "compile": 1.10} for name in ("mlp", "transformer", "resnet")},
    2: {
        "mlp": {"step": 0.10, "compile": 2.0},
        "transformer": {"step": 0.55, "compile": 2.0},
        "resnet": {"step": 0.55, "compile": 2.0},
    },
}

Times = dict[str, dict[str, list[float]]]  # by "step", "compile" and "compile CPU", then by variant; seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=GOALS[1], default=list(GOALS[1]))
    parser.add_argument("--processes", nargs="+", type=int, choices=GOALS, default=list(GOALS))
    parser.add_argument("--steps", type=int, default=40, help="steps of each variant")
    parser.add_argument("--compilations", type=int, default=5, help="compilations of each variant")
    parser.add_argument("--strategy", choices=("flat", "tuple"), help="ours instead of the default")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal is missed")
    parser.add_argument("--worker", nargs=4, metavar=("PROCESSES", "RANK", "PORT", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        processes, rank, port = (int(text) for text in args.worker[:3])
        results = measure(args, processes, rank, port)
        if rank == 0:
            Path(args.worker[3]).write_text(json.dumps(results))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the workers end with us
    passed = [report(processes, model, times) for processes in args.processes for model, times in spawn(processes)]
    sys.exit(1 if args.check and not all(passed) else 0)


def spawn(processes: int) -> list[tuple[str, Times]]:
    """Runs the worker processes with our own arguments and returns the times of each model."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    devices = 2 // processes
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "times.json"
        workers = [
            subprocess.Popen(
                [sys.executable, __file__, *sys.argv[1:], "--worker", *map(str, (processes, rank, port, file))], env=env
            )
            for rank in range(processes)
        ]
        try:
            codes = [worker.wait(timeout=3600) for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
        if any(codes):
            sys.exit(f"the benchmark's processes ended with {codes}")
        return list(json.loads(file.read_text()).items())


def measure(args: argparse.Namespace, processes: int, rank: int, port: int) -> dict[str, Times]:
    """Measures every model; the processes do the same in step."""
    import jax

    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank)
    from jax_models import MODELS

    return {name: measure_model(MODELS[name](), args) for name in args.models}


def measure_model(model: Any, args: argparse.Namespace) -> Times:
    import jax
    import numpy as np
    from jax.sharding import AxisType, Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))

    def place(tree: Any, spec: Any) -> Any:
        def one(array: np.ndarray) -> jax.Array:
            return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])

        return jax.tree.map(one, tree)

    whole = jax.tree.map(lambda x: np.concatenate([x] * mesh.size), model.batch)
    params, batch = place(model.params, P()), place(whole, P("data"))
    times: Times = {what: {variant: [] for variant in VARIANTS} for what in ("step", "compile", "compile CPU")}
    compiled = {}
    for i in range(args.compilations):
        for variant in in_turn(i):
            start, cpu = time.perf_counter(), time.process_time()
            compiled[variant] = make_step(variant, model, mesh, args.strategy).lower(params, batch).compile()
            times["compile"][variant].append(time.perf_counter() - start)
            times["compile CPU"][variant].append(time.process_time() - cpu)
    for i in range(args.steps + 2):
        for variant in in_turn(i):
            start = time.perf_counter()
            jax.block_until_ready(compiled[variant](params, batch))
            if i >= 2:  # warm
                times["step"][variant].append(time.perf_counter() - start)
    return times


def in_turn(i: int) -> tuple[str, ...]:
    """Returns the variants, another one first in each round."""
    first = i % len(VARIANTS)
    return VARIANTS[first:] + VARIANTS[:first]


def make_step(variant: str, model: Any, mesh: Any, strategy: Any) -> Any:
    """Returns the jitted step (params, batch) -> (params, loss), with plain gradient descent."""
    import jax
    from jax import lax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from unified_ddp.jax import DistributedDataParallel

    def descend(params: Any, grads: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)

    def ours(params: Any, batch: Any) -> Any:
        ddp = DistributedDataParallel(params, axis_name="data", strategy=strategy)
        loss, grads = ddp.value_and_grad(model.loss_fn)(params, batch)
        return descend(params, grads), ddp.mean(loss)

    def leaf(params: Any, batch: Any) -> Any:
        local = jax.tree.map(lambda p: lax.pcast(p, "data", to="varying"), params)
        loss, grads = jax.value_and_grad(model.loss_fn)(local, batch)
        grads = jax.tree.map(lambda g: lax.psum(g / mesh.size, "data"), grads)
        return descend(params, grads), lax.pmean(loss, "data")

    def plain(params: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(model.loss_fn)(params, batch)
        return descend(params, grads), loss

    if variant == "jit":
        return jax.jit(plain, out_shardings=NamedSharding(mesh, P()))
    step = {"ours": ours, "leaf": leaf, "bare": plain}[variant]
    checked = variant != "bare"  # whose replicas go apart
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=checked))


def report(processes: int, model: str, times: Times) -> bool:
    """Prints the times and ratios; returns whether the goals are met."""
    from rich.console import Console
    from rich.table import Table

    load = os.getloadavg()[0]
    where = "1 process, 2 devices" if processes == 1 else f"{processes} processes over gloo"
    table = Table("", *VARIANTS, "ours / reference", "goal", "", title=f"{model}, {where}; load average {load:.1f}")
    met = []
    for what, scale, unit in (("step", 1e3, "ms"), ("compile", 1.0, "s"), ("compile CPU", 1.0, "s")):
        for take, name in ((statistics.median, "median"), (min, "min")):
            values = {variant: take(times[what][variant]) for variant in VARIANTS}
            reference = min(values["leaf"], values["jit"]) if processes == 1 else values["leaf"]
            ratio, goal = values["ours"] / reference, GOALS[processes][model].get(what)
            verdict = ["", ""]
            if goal is not None and take is statistics.median:
                met.append(ratio <= goal)
                verdict = [f"<= {goal:.2f}", "met" if met[-1] else "MISSED"]
            cells = [f"{values[variant] * scale:,.2f}" for variant in VARIANTS]
            table.add_row(f"{what}, {name} ({unit})", *cells, f"{ratio:.3f}", *verdict)
    Console(width=120).print(table)
    return all(met)


if __name__ == "__main__":
    main()
