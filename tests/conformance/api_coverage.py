"""`PYTHONPATH=tests python -m conformance.api_coverage`: what torch's class has and ours has not, or has otherwise.

Compares by introspection the constructor's and the methods' signatures (names, order, defaults), and the members of the
class, of an instance, and of its `reducer` and `logger`. Ours may take more: keyword-only arguments with a default. A
member left out on purpose stands in `LEFT_OUT`, with why.
"""

import inspect
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from unified_ddp.torch.ddp import DistributedDataParallel

__all__ = ["LEFT_OUT", "Difference", "compare"]

_HOOKS = "our hooks are native and registered by the reducer"
_DELAYED = "delayed parameters have buckets of their own"
_CASTS = "parameters are cast together, without hooks and streams by submodule"

LEFT_OUT = {
    "class._fire_reducer_autograd_hook": _HOOKS,
    "class._delayed_all_reduce_hook": _DELAYED,
    "class._register_delay_all_reduce_hook": _DELAYED,
    "class._root_copy_hook": _CASTS,
    "class._module_wait_for_copy_hook": _CASTS,
    "class._ddp_init_helper": "construction is one function, `_make_reducer`",
    "instance._delay_grad_buffer": _DELAYED,
    "instance._delay_grad_views": _DELAYED,
    "instance._delay_all_reduce_all_params": _DELAYED,
    "instance._bucket_config": "`plan` and `bucket_bytes_cap_list` say the caps",
    "instance._static_graph_delay_allreduce_enqueued": "a static graph's first backward pass ends as any other",
    "reducer._autograd_hook": _HOOKS,
    "reducer._delay_all_reduce": "a static graph's first backward pass ends as any other",
    "reducer.get_backward_stats": "no time is taken for each gradient; logging data tell when a backward pass began",
    "reducer._set_mixed_precision_param_dtype": "the storage's dtype is settled when the reducer is built",
    "reducer._pybind11_conduit_v1_": "pybind11's own",
    "logger._pybind11_conduit_v1_": "pybind11's own",
}
"""Members that make no sense here; torch's methods of these names are inherited, and never called."""


@dataclass(frozen=True)
class Difference:
    """A member that is missing or differs."""

    member: str
    what: str


def compare() -> list[Difference]:
    """Returns every difference that `LEFT_OUT` does not name; needs a process group."""
    torchs, ours = TorchDDP(nn.Linear(1, 1)), DistributedDataParallel(nn.Linear(1, 1))
    found = [*_signatures(), *_reduction_overridden()]
    found += _missing("instance", torchs, ours)
    found += _missing("reducer", torchs.reducer, ours.reducer)
    found += _missing("logger", torchs.logger, ours.logger)
    return [d for d in found if d.member not in LEFT_OUT]


def _missing(kind: str, torchs: Any, ours: Any) -> list[Difference]:
    return [Difference(f"{kind}.{name}", "missing") for name in sorted(set(dir(torchs)) - set(dir(ours)))]


def _signatures() -> Iterator[Difference]:
    """Compares what the class itself defines, not what it has from Module."""
    for name, member in sorted(vars(TorchDDP).items()):
        if not callable(member) and not isinstance(member, classmethod | staticmethod):
            continue
        label = f"class.{name}"
        ours = getattr(DistributedDataParallel, name, None)
        if ours is None:
            yield Difference(label, "missing")
            continue
        torchs = inspect.signature(getattr(TorchDDP, name)).parameters
        expected = [_shown(p) for p in torchs.values()]
        found = [_shown(p) for p in inspect.signature(ours).parameters.values() if not _is_extra(p, torchs)]
        if expected != found:
            yield Difference(label, f"torch's takes ({', '.join(expected)}), ours ({', '.join(found)})")


def _shown(p: inspect.Parameter) -> str:
    default = "" if p.default is p.empty else f"={p.default!r}"
    stars = "*" if p.kind is p.VAR_POSITIONAL else "**" if p.kind is p.VAR_KEYWORD else ""
    return f"{stars}{p.name}{default}"


def _is_extra(p: inspect.Parameter, torchs: Mapping[str, inspect.Parameter]) -> bool:
    """An option of ours beyond torch's, which no call written for torch's class meets."""
    return p.kind is p.KEYWORD_ONLY and p.default is not p.empty and p.name not in torchs


def _reduction_overridden() -> Iterator[Difference]:
    """Methods of torch's class that use members of its reducer which ours has not would fail if they were called."""
    absent = {m.partition(".")[2] for m in LEFT_OUT if m.startswith(("reducer.", "instance."))}
    for name, member in sorted(vars(TorchDDP).items()):
        inherited = getattr(DistributedDataParallel, name, None) is member
        if inherited and inspect.isfunction(member):
            used = absent & _names(member.__code__)
            if used:
                yield Difference(f"class.{name}", f"inherited, but uses {', '.join(sorted(used))}")


def _names(code: Any) -> set[str]:
    inner = [_names(c) for c in code.co_consts if inspect.iscode(c)]
    return set(code.co_names).union(*inner)


@contextmanager
def _group() -> Iterator[None]:
    """A process group of one rank, unless there is one."""
    if dist.is_initialized():
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def main() -> int:
    """Prints the differences and what is left out; returns 1 if there are differences."""
    with _group():
        differences = compare()
    console = Console()
    left = Table("left out on purpose", "why", title=f"torch {torch.__version__}: DistributedDataParallel")
    for member, why in LEFT_OUT.items():
        left.add_row(member, why)
    left.columns[0].no_wrap = True
    console.print(left)
    if differences:
        table = Table("member", "missing or different")
        for difference in differences:
            table.add_row(difference.member, difference.what)
        console.print(table)
    console.print(f"{len(differences)} members missing or different, {len(LEFT_OUT)} left out on purpose")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
