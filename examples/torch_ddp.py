"""Trains a small classifier with DistributedDataParallel: sampler, accumulation, checkpoints, one script for any size.

Two ranks of one machine, on the CPU or on its GPUs:

    torchrun --nproc-per-node 2 examples/torch_ddp.py

Two machines of eight GPUs over NCCL; run this on each, with the first one's address:

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-id job1 --rdzv-backend c10d --rdzv-endpoint first-machine:29500 \
        examples/torch_ddp.py

Under SLURM, one torchrun a node:

    #SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8
    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d \
        --rdzv-endpoint "$first:29500" examples/torch_ddp.py

NCCL picks a network interface by itself; where it picks a wrong one, set NCCL_SOCKET_IFNAME on every node.
"""

import argparse
import contextlib
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from unified_ddp.torch import DistributedDataParallel


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a classifier on made-up data; start it with torchrun.")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16, help="samples a rank and microbatch")
    parser.add_argument("--accumulate", type=int, default=2, help="microbatches a step")
    parser.add_argument("--workers", type=int, default=1, help="processes that load data, a rank")
    parser.add_argument("--start-method", default="forkserver", choices=("forkserver", "spawn"))
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
    return parser.parse_args()


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)  # the same on every rank; the sampler cuts it into shares
    inputs = torch.randn(1024, 16, generator=generator)
    return TensorDataset(inputs, inputs[:, :4].argmax(1))


def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader, accumulate: int) -> float:
    """One epoch; returns the mean loss over all ranks."""
    device = next(model.parameters()).device
    total = torch.zeros((), device=device)
    for i, (inputs, labels) in enumerate(loader):
        last = i + 1 == len(loader)
        steps = last or (i + 1) % accumulate == 0
        # gradients stay local under no_sync, forward included, and are averaged in the step's last backward pass
        with contextlib.nullcontext() if steps else model.no_sync():
            loss = nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device))
            (loss / accumulate).backward()
        total += loss.detach()
        if steps:
            optimizer.step()
            optimizer.zero_grad()
    dist.all_reduce(total)
    return total.item() / (len(loader) * dist.get_world_size())


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    """Rank 0 writes, to the side and then in place: a job ended meanwhile leaves the old checkpoint whole."""
    if dist.get_rank() == 0:
        aside = path.with_suffix(".part")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, aside)
        aside.replace(path)
    dist.barrier()


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Returns the epoch to go on from. map_location: what rank 0 saved from its device goes to this rank's."""
    if not path.exists():
        return 0
    state = torch.load(path, map_location=device, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"]


def main() -> None:
    args = arguments()
    gpu = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)).to(device),
        device_ids=[local_rank] if gpu else None,
        gradient_as_bucket_view=True,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    data = dataset()
    sampler = DistributedSampler(data)
    loader = DataLoader(
        data,
        args.batch_size,
        sampler=sampler,
        num_workers=args.workers,
        # not fork: NCCL's threads do not survive it
        multiprocessing_context=args.start_method if args.workers else None,
        persistent_workers=args.workers > 0,
        pin_memory=gpu,
    )
    first = load(args.checkpoint, model, optimizer, device)
    if first >= args.epochs and dist.get_rank() == 0:
        print(f"{args.checkpoint} holds all {first} epochs: remove it, or ask for more with --epochs")
    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)  # another order in each epoch
        loss = train_epoch(model, optimizer, loader, args.accumulate)
        save(args.checkpoint, model, optimizer, epoch + 1)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
