"""The adapted mode: torch's test cases that ask for two GPUs, run on the CPU.

- skip decorators for up to two GPUs do nothing;
- an accelerator as a device argument means the CPU, `Tensor.cuda()` a copy, `Module.cuda()` nothing;
- device calls of torch.cuda and torch.accelerator do nothing; streams and events are dummies, as work is synchronous;
- the one convolution input that would take hours on a CPU is smaller;
- the class under test gets no device_ids if its module is on the CPU and at most one is given.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

__all__ = ["install", "without_device_ids"]

CPU = torch.device("cpu")


def _on_cpu(device: Any) -> Any:
    if isinstance(device, torch.device):
        accelerator = device.type == "cuda"
    elif isinstance(device, str):
        accelerator = device.partition(":")[0] == "cuda"
    else:
        accelerator = isinstance(device, int) and not isinstance(device, bool)
    return CPU if accelerator else device


class CudaToCpu(TorchFunctionMode):
    """Turns accelerator devices into the CPU in every torch function."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0].clone()
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if func is torch.ones and args == (1, 1, 1000, 1000):
            args = (1, 1, 40, 40)
        if func is torch.Tensor.to and len(args) > 1:
            args = (args[0], _on_cpu(args[1]), *args[2:])
        return func(*args, **kwargs)


class DummyStream:
    """Stands for a stream or an event."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def __enter__(self) -> "DummyStream":
        return self

    def __exit__(self, *_: Any) -> None: ...

    def wait(self, *_args: Any, **_kwargs: Any) -> None: ...

    record = synchronize = wait_stream = wait_event = wait

    def record_event(self, *_args: Any, **_kwargs: Any) -> "DummyStream":
        return DummyStream()

    def query(self) -> bool:
        return True

    def elapsed_time(self, _other: Any) -> float:
        return 0.0


def install() -> None:
    """Changes torch for the rest of this process."""
    install.mode = CudaToCpu()  # type: ignore[attr-defined]
    install.mode.__enter__()  # type: ignore[attr-defined]
    nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign,assignment]
    for cls in (nn.Module, nn.utils.rnn.PackedSequence):
        cls.to = _to_cpu(cls.to)
    _silence_devices()
    _run_gated_cases()


def _to_cpu(to: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(to)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (_on_cpu(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        return to(self, *args, **kwargs)

    return wrapper


def _silence_devices() -> None:
    # A new function each time: dynamo refuses one object under two names.
    def returns(value: Any = None, make: Callable[[], Any] | None = None) -> Callable[..., Any]:
        return lambda *_args, **_kwargs: make() if make else value

    for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"):
        setattr(torch.cuda, name, returns())
    for name in ("set_device_index", "synchronize"):
        setattr(torch.accelerator, name, returns())
    modules: list[tuple[Any, str]] = [(torch.cuda, "current_device"), (torch.accelerator, "current_device_index")]
    for module, index in modules:
        setattr(module, index, returns(0))
        module.device_count = returns(2)
        module.current_stream = returns(make=DummyStream)
    for name in ("device", "stream"):
        setattr(torch.cuda, name, returns(make=contextlib.nullcontext))
    torch.cuda.default_stream = returns(make=DummyStream)
    for module in (torch.cuda, torch):
        for name in ("Stream", "Event"):
            setattr(module, name, type(name, (DummyStream,), {}))


def _run_gated_cases() -> None:
    from torch.testing._internal import common_distributed

    def run_anyway(func: Callable[..., Any]) -> Callable[..., Any]:
        return functools.wraps(func)(lambda *args, **kwargs: func(*args, **kwargs))

    real = common_distributed.skip_if_lt_x_gpu

    def skip_if_lt_x_gpu(x: int, *, allow_cpu: bool = False) -> Callable[..., Any]:
        return run_anyway if x <= 2 else real(x, allow_cpu=allow_cpu)

    changes: dict[str, Any] = {
        "skip_if_lt_x_gpu": skip_if_lt_x_gpu,
        "skip_if_no_gpu": run_anyway,
        "nccl_skip_if_lt_x_gpu": lambda backend, x: run_anyway,
        "require_n_gpus_for_nccl_backend": lambda n, backend: run_anyway,
        "requires_accelerator_dist_backend": lambda backends=None: run_anyway,
        "init_multigpu_helper": lambda world_size, backend: {i: [i] for i in range(world_size)},
    }
    for name, value in changes.items():
        setattr(common_distributed, name, value)


def without_device_ids(base: Any) -> Any:
    """Returns a subclass of `base` that forgets the device of a module which is on the CPU."""

    def __init__(
        self: Any, module: nn.Module, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        try:
            on_cpu = all(p.device.type == "cpu" for p in module.parameters())
        except Exception:
            on_cpu = False
        if on_cpu and (device_ids is None or len(device_ids) <= 1):
            device_ids = output_device = None
        base.__init__(self, module, device_ids, output_device, *args, **kwargs)

    namespace = {
        "__init__": __init__,
        "__doc__": base.__doc__,
        "__module__": "torch.nn.parallel.distributed",
        "__qualname__": "DistributedDataParallel",
    }
    return type(base)("DistributedDataParallel", (base,), namespace)
