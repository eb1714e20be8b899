"""Runs a program on a rank: on the wrapper, and each operation first on a plain copy, whose gradients are recorded.

What is recorded are events, from which the parent computes what must be in `.grad` at each moment: gradients that plain
autograd adds ("local"), or adds in a pass that is to be reduced ("sync"); gradients that are cleared or go with their
parameter; and what the wrapper's `.grad` were ("seen").
"""

import contextlib
import datetime
import gc
import time
import warnings
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from support.oracle import local_copy
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from fuzz.model import WIDTH, Net, OnPurpose, change_module, loss, seeded
from fuzz.programs import Program
from unified_ddp import UnifiedDDPError
from unified_ddp.hooks import AllReduce, Compressed
from unified_ddp.torch import DistributedDataParallel, HookState, shared_hook

LEARNING_RATE = 0.05
Gradients = dict[str, np.ndarray | None]


def run_program(rank: int, world_size: int, program: Program, number: int) -> dict[str, Any]:
    """The case for a world: returns the rank's events, and the error that ended it."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=program["timeout"]))
    run = Run(rank, program, group)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            run.all()
        except Exception as error:
            import traceback

            run.error = {
                "type": type(error).__name__,
                "named": isinstance(error, UnifiedDDPError),
                "text": str(error),
                "where": traceback.format_exc(),
            }
    result = {"events": run.events, "error": run.error}
    run.close()
    _leave_together(number, world_size, result["error"] is None)
    with contextlib.suppress(Exception):
        dist.destroy_process_group(group)
    return result


def _leave_together(number: int, world_size: int, wait: bool) -> None:
    """A rank that is through keeps its connections for a while, as others may still read from them."""
    store = dist.PrefixStore("fuzz", dist.distributed_c10d._get_default_store())
    store.add(f"{number}", 1)
    deadline = time.monotonic() + 1.0
    while wait and store.add(f"{number}", 0) < world_size and time.monotonic() < deadline:
        time.sleep(0.01)


class Run:
    def __init__(self, rank: int, program: Program, group: dist.ProcessGroup) -> None:
        self.rank = rank
        self.program = program
        self.group = group
        self.events: list[tuple[str, Any]] = []
        self.error: dict[str, Any] | None = None
        self.ddp: Any = None
        self.hook_fails = False
        self.is_local = False
        """Whether this rank has added gradients that are not reduced, on which no optimizer may step."""

    def all(self) -> None:
        program = self.program
        model = seeded(program["seed"], lambda: Net(program["parts"], program["buffers"]))
        for part in program["frozen"]:
            change_module(model, "freeze", part, 0)
        options = dict(program["options"])
        for name, ranks in program.get("differs", {}).items():
            options[name] = self.rank in ranks
        self.ddp = DistributedDataParallel(model, process_group=self.group, **options)
        if self.rank in program.get("hook_on", range(program["ranks"])):
            self.register_hook()
        for step in program["steps"]:
            if self.rank not in step.get("only", range(program["ranks"])):
                continue
            try:
                self.step(step)
            except OnPurpose:
                self.ddp.zero_grad()
                self.note("zero", "none")

    def register_hook(self) -> None:
        group = self.group
        match self.program["hook"]:
            case "custom":
                self.ddp.register_comm_hook(self, custom_hook)
            case "torch_allreduce":
                self.ddp.register_comm_hook(group, default_hooks.allreduce_hook)
            case "torch_fp16":
                self.ddp.register_comm_hook(group, default_hooks.fp16_compress_hook)
            case "AllReduce":
                self.ddp.register_comm_hook(HookState(AllReduce(), group), shared_hook)
            case "Compressed":
                self.ddp.register_comm_hook(HookState(Compressed(AllReduce(), "bfloat16"), group), shared_hook)

    def note(self, kind: str, what: Any = None) -> None:
        if kind in ("local", "sync", "zero") and what != "keep":
            self.is_local = kind == "local"
        self.events.append((kind, what))

    def step(self, step: dict[str, Any]) -> None:
        self.note("zero", step["zero"])
        if step["zero"] != "keep":
            self.ddp.zero_grad(set_to_none=step["zero"] == "none")
        self.plain = local_copy(self.ddp.module)
        for p in self.plain.parameters():
            p.grad = None
        self.slots: dict[int, tuple[Any, Any]] = {}
        self.syncs: dict[int, bool] = {}
        for number, op in enumerate(step["ops"]):
            if self.rank in op.get("only", range(self.program["ranks"])):
                self.number = number
                getattr(self, op["do"])(op)
        if not self.is_local:
            with torch.no_grad():
                for p in self.ddp.module.parameters():
                    if p.grad is not None:
                        p -= LEARNING_RATE * p.grad

    # --- operations, each on the plain copy, then on the wrapper

    def change(self, op: dict[str, Any]) -> None:
        with self.dropped():
            for module in (self.plain, self.ddp.module):
                change_module(module, op["kind"], op["part"], op["seed"])

    def forward(self, op: dict[str, Any]) -> None:
        seed = hash((self.program["seed"], len(self.events), self.number, self.rank))
        x = seeded(seed % 2**31, lambda: torch.randn(4, WIDTH))
        inside = op.get("inside")

        def change(module: Any) -> None:
            if inside is not None:
                change_module(module, inside["kind"], inside["part"], inside["seed"])

        arguments = (x, op.get("use", "abcd"), change, self.rank in op.get("fails", ()))
        sync = not (op.get("no_sync", False) or self.rank in op.get("no_sync_on", ()))
        plain: Any = None
        with self.dropped(), contextlib.suppress(OnPurpose):
            plain = loss(self.plain(*arguments))
        with self.ddp.no_sync(enabled=not sync):
            out = loss(self.ddp(*arguments))
        if sync:
            self.set_weight()
        self.slots[op["slot"]] = plain, out
        self.syncs[op["slot"]] = sync

    def backward(self, op: dict[str, Any]) -> None:
        slots = [slot for slot in op["slots"] if slot in self.slots]
        if not slots:
            return
        retain = op.get("retain", False)
        fails = self.rank in op.get("fails", ())
        sync = any(self.syncs[slot] for slot in slots)
        plain, out = (sum(self.slots[slot][i] for slot in slots) for i in range(2))
        self.plain.fails_backward = fails
        try:
            plain.backward(retain_graph=retain)
        except OnPurpose:
            pass
        else:
            self.note("sync" if sync else "local", self.take_plain())
        self.ddp.module.fails_backward, self.hook_fails = fails, self.rank in op.get("fails_hook", ())
        try:
            out.backward(retain_graph=retain)
        finally:
            self.plain.fails_backward = self.ddp.module.fails_backward = self.hook_fails = False
        self.see()

    def autograd_grad(self, op: dict[str, Any]) -> None:
        if op["slot"] in self.slots:
            wanted = [p for p in self.ddp.module.parameters() if p.requires_grad]
            torch.autograd.grad(self.slots[op["slot"]][1], wanted, retain_graph=True, allow_unused=True)
            self.see()

    def sync_gradients(self, op: dict[str, Any]) -> None:
        self.set_weight()
        self.note("sync", {})
        self.ddp.sync_gradients()
        self.see()

    def set_weight(self) -> None:
        if self.program["options"].get("reduction") == "weighted_mean":
            self.ddp.set_weight(self.rank + 1)

    # --- what is recorded

    @contextlib.contextmanager
    def dropped(self) -> Any:
        before = dict(self.plain.named_parameters())
        yield
        now = dict(self.plain.named_parameters())
        gone = [name for name, p in before.items() if now.get(name) is not p]
        if gone:
            self.note("drop", gone)

    def take_plain(self) -> Gradients:
        """The plain copy's gradients since the last call, with None for those that have none."""
        taken: Gradients = {}
        for name, p in self.plain.named_parameters():
            if p.requires_grad:
                taken[name] = None if p.grad is None else p.grad.double().numpy().copy()
            p.grad = None
        return taken

    def see(self) -> None:
        named = [(n, p.grad) for n, p in self.ddp.module.named_parameters() if p.requires_grad]
        self.note("seen", {n: None if g is None else g.detach().double().numpy().copy() for n, g in named})

    def close(self) -> None:
        self.ddp, self.slots, self.plain = None, {}, None
        gc.collect()


def custom_hook(run: Run, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    if run.hook_fails:
        raise OnPurpose("in the comm hook")
    work = dist.all_reduce(bucket.buffer().div_(run.program["ranks"]), group=run.group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])
