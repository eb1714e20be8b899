"""What the control plane costs: a step of a 5-million-parameter transformer with it and without, and one announcement.

Two ranks train the same model in two wrappers, which take turns in one run, so that both meet the same machine. The
latency of an announcement, an all-gather of a few integers by a ring, is measured at 2, 3 and 4 ranks and fitted by
start + hop * (ranks - 1). The goal is 2% of the step; `--check` makes a missed goal an error.
"""

import argparse
import multiprocessing as mp
import os
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from unified_ddp.torch import DistributedDataParallel
from unified_ddp.torch.reduction.control_plane import plane_of
from unified_ddp.torch.reduction.transport import ProcessGroupTransport

GOAL = 0.02
RANKS = (2, 3, 4)
MODELLED = (8, 64, 256, 1024)
ANNOUNCED = 9  # integers in an announcement
WIDTH, LAYERS, BATCH, LENGTH = 256, 6, 4, 64


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS)
        self.head = nn.Linear(WIDTH, 1000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(tokens)))


def measure_steps(rank: int, rounds: int, steps: int) -> dict[bool, list[float]]:
    """Returns seconds a step, one number a round, by whether the control plane was on."""
    torch.manual_seed(0)
    wrappers = {on: DistributedDataParallel(Transformer(), control_plane=on) for on in (True, False)}
    optimizers = {on: torch.optim.SGD(ddp.parameters(), lr=0.01) for on, ddp in wrappers.items()}
    tokens = torch.randint(1000, (BATCH, LENGTH), generator=torch.Generator().manual_seed(rank))

    def run(on: bool, count: int) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(count):
            optimizers[on].zero_grad()
            wrappers[on](tokens).float().pow(2).mean().backward()
            optimizers[on].step()
        return (time.perf_counter() - start) / count

    seconds: dict[bool, list[float]] = {True: [], False: []}
    for on in wrappers:
        run(on, 3)
    for i in range(rounds):
        for on in (True, False) if i % 2 else (False, True):
            seconds[on].append(run(on, steps))
    return seconds


def measure_latency(count: int) -> list[float]:
    """Returns seconds an announcement that is waited for at once."""
    plane = plane_of(ProcessGroupTransport(dist.distributed_c10d._get_default_group(), torch.device("cpu")))
    assert plane is not None
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        plane.start(range(ANNOUNCED)).result(lambda: None)
        seconds.append(time.perf_counter() - start)
    return seconds[count // 10 :]


def serve(rank: int, ranks: int, store: str, args: argparse.Namespace, pipe: Any) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    steps = measure_steps(rank, args.rounds, args.steps) if ranks == 2 else None
    latency = measure_latency(args.announcements)
    dist.barrier()
    pipe.send((steps, latency))
    dist.destroy_process_group()


def measure(ranks: int, args: argparse.Namespace) -> Any:
    """Returns what rank 0 measured."""
    context = mp.get_context("spawn")
    store = tempfile.mktemp(prefix="unified_ddp_store_")
    pipes = [context.Pipe() for _ in range(ranks)]
    processes = [
        context.Process(target=serve, args=(rank, ranks, store, args, pipes[rank][1]), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    results = [ours.recv() for ours, _ in pipes]
    for process in processes:
        process.join()
    return results[0]


def quartiles(seconds: list[float]) -> str:
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return f"{middle * 1e3:.3f} ms ({low * 1e3:.3f} to {high * 1e3:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31, help="of each variant")
    parser.add_argument("--steps", type=int, default=4, help="in a round")
    parser.add_argument("--announcements", type=int, default=2000)
    parser.add_argument("--check", action="store_true", help="exit with 1 if the goal is missed")
    args = parser.parse_args()
    print(f"load of this machine before: {os.getloadavg()[0]:.2f} on {os.cpu_count()} processors")
    measured = {ranks: measure(ranks, args) for ranks in RANKS}
    seconds: dict[bool, list[float]] = measured[2][0]
    medians = {on: statistics.median(values) for on, values in seconds.items()}
    # Rounds of a pair follow each other: the median of their ratios is moved less by other load than that of medians.
    paired = statistics.median(a / b for a, b in zip(seconds[True], seconds[False], strict=True)) - 1
    parameters = sum(p.numel() for p in Transformer().parameters())
    print(f"step of a transformer of {parameters / 1e6:.1f} million parameters, 2 ranks, {args.rounds} rounds each")
    for on in (True, False):
        print(f"  control_plane={on}: {quartiles(seconds[on])}")
    print(f"  cost: {medians[True] / medians[False] - 1:+.2%} by medians, {paired:+.2%} by pairs; goal {GOAL:.0%}")
    latency = {ranks: statistics.median(measured[ranks][1]) for ranks in RANKS}
    for ranks in RANKS:
        print(f"one announcement at {ranks} ranks: {quartiles(measured[ranks][1])}")
    fit = statistics.linear_regression([ranks - 1 for ranks in RANKS], [latency[ranks] for ranks in RANKS])
    print(f"fitted: {fit.intercept * 1e6:.0f} us + {fit.slope * 1e6:.0f} us * (ranks - 1)")
    for ranks in MODELLED:
        print(f"  modelled at {ranks} ranks: {(fit.intercept + fit.slope * (ranks - 1)) * 1e3:.1f} ms")
    sys.exit(1 if args.check and paired > GOAL else 0)


if __name__ == "__main__":
    main()
