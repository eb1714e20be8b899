"""A torch module with its loss and optimizer, as one side of a pair."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import unified_ddp
from unified_ddp.equivalence.batches import flatten, map_arrays
from unified_ddp.equivalence.errors import EquivalenceError
from unified_ddp.equivalence.results import SideInfo
from unified_ddp.equivalence.side import Arrays, Evaluation, Reduction, TensorInfo, Trajectory
from unified_ddp.torch.equivalence.optimizers import Stepper, stepper_of
from unified_ddp.torch.equivalence.reduction import reduce_on_ranks
from unified_ddp.torch.equivalence.tensors import cast_module, describe, from_numpy, load, tensors_of, to_numpy

Loss = Callable[[nn.Module, Any], Any]


class TorchSide:
    """A torch model as one side of a pair. The user's module is never changed: work is done on copies.

    Args:
        model: in the mode, training or evaluation, in which it is to be compared, on the device where it is to run.
        loss: called as loss(model, batch) with a batch of tensors; returns the loss, or (loss, outputs), where outputs
            are a tensor or a tree (dict, tuple, list) of tensors to be compared as well.
        optimizer: called with a module; returns a torch optimizer, an (optimizer, scheduler) pair, or a function
            without arguments that clips, steps and schedules as the user's training loop does after backward.
        ddp: called with a module on every rank of the reduced rung; returns it wrapped. None wraps it in
            `unified_ddp.torch.DistributedDataParallel`.
    """

    framework = "torch"

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: Callable[[nn.Module], Any] | None = None,
        ddp: Callable[[nn.Module], nn.Module] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"TorchSide takes a torch.nn.Module, not {type(model).__name__}")
        self.model, self.loss, self.optimizer, self.ddp = model, loss, optimizer, ddp
        self._copies: dict[str, nn.Module] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_copies": {}}

    @property
    def has_optimizer(self) -> bool:
        """See `Side`."""
        return self.optimizer is not None

    def tensors(self) -> tuple[TensorInfo, ...]:
        """See `Side`."""
        return describe(self.model)

    def values(self) -> Arrays:
        """See `Side`."""
        return {name: to_numpy(tensor) for name, tensor in tensors_of(self.model).items()}

    def module(self, values: Arrays, dtype: str, *, fresh: bool = False) -> nn.Module:
        """Returns a copy of the model in a dtype with these values.

        Args:
            values: by name; saved floating-point buffers included.
            dtype: of floating-point tensors.
            fresh: a copy of its own, to be trained; otherwise one that the next call changes.
        """
        if dtype not in self._copies:
            self._copies[dtype] = cast_module(copy.deepcopy(self.model), dtype)
        module = copy.deepcopy(self._copies[dtype]) if fresh else self._copies[dtype]
        _reset_other_buffers(module, self.model)
        load(module, values)
        return module

    def evaluate(self, values: Arrays, batch: Any, dtype: str, *, gradients: bool = True) -> Evaluation:
        """See `Side`."""
        return self._evaluate(values, batch, dtype, gradients=gradients, seed=0)

    def _evaluate(self, values: Arrays, batch: Any, dtype: str, *, gradients: bool, seed: int) -> Evaluation:
        module = self.module(values, dtype)
        with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(gradients):
            torch.manual_seed(seed)
            loss, outputs = self.call(module, self.batch(batch, dtype))
        grads: Arrays = {}
        unused: list[str] = []
        if gradients:
            grads, unused = gradients_of(module, loss)
        saved = tensors_of(module)
        return Evaluation(
            outputs={key: to_numpy(value) for key, value in flatten(outputs, "output").items()},
            loss=to_numpy(loss),
            gradients=grads,
            buffers={name: to_numpy(t) for name, t in saved.items() if not isinstance(t, nn.Parameter)},
            unused=tuple(unused),
        )

    def call(self, module: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        """Returns the loss and the outputs, {} if the loss function returns none."""
        result = self.loss(module, batch)
        loss, outputs = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise EquivalenceError(
                f"the torch loss function returned {_kind(loss)}; it returns a scalar tensor, or (loss, outputs)"
            )
        return loss, outputs

    def batch(self, batch: Any, dtype: str) -> Any:
        """Returns a batch of arrays as tensors on the model's device, floating-point ones in the dtype."""
        device = next((t.device for t in self.model.parameters()), torch.device("cpu"))
        return map_arrays(lambda array: _input(array, dtype).to(device), batch)

    def randomness(self, values: Arrays, batch: Any) -> str:
        """See `Side`."""
        runs = [self._evaluate(values, batch, "float32", gradients=False, seed=seed) for seed in (0, 1)]
        if np.array_equal(runs[0].loss, runs[1].loss, equal_nan=True):
            return ""
        dropouts = [
            name
            for name, module in self.model.named_modules()
            if "dropout" in type(module).__name__.lower() and module.p
        ]
        what = f"dropout in {', '.join(dropouts[:5])}" if dropouts else "the model or its loss draws random numbers"
        return f"{what}: its loss is {float(runs[0].loss):.6g} or {float(runs[1].loss):.6g} by the seed"

    def reduce(
        self, values: Arrays, shards: Sequence[Any], dtype: str, buckets: Sequence[Sequence[str]] | None = None
    ) -> Reduction:
        """See `Side`."""
        return reduce_on_ranks(self, values, shards, dtype)

    def reduce_by(
        self, step: Callable[..., Any] | None, values: Arrays, batch: Any, shards: Sequence[Any], dtype: str
    ) -> Reduction:
        """See `Side`."""
        return reduce_on_ranks(self, values, shards, dtype, step=step)

    def wrap(self, module: nn.Module, *, unused: bool) -> nn.Module:
        """Returns the module as the ranks train it; `unused`: some rank's backward does not reach all parameters."""
        if self.ddp is not None:
            return self.ddp(module)
        from unified_ddp.torch.ddp import DistributedDataParallel

        return DistributedDataParallel(module, find_unused_parameters=unused)

    def move(self, device: torch.device) -> None:
        """Moves the model; used in a rank's process, which has a copy of its own."""
        self.model.to(device)
        self._copies.clear()

    def modules(self) -> set[str]:
        """Returns the names of the Python modules that define what this side holds."""
        held = [self.loss, self.optimizer, self.ddp, *(type(part) for part in self.model.modules())]
        return {name for part in held if (name := getattr(part, "__module__", None))}

    def update(self, values: Arrays, gradients: Sequence[Arrays], dtype: str) -> tuple[Arrays, ...]:
        """See `Side`."""
        module = self.module(values, dtype, fresh=True)
        step = self._stepper(module)
        states = []
        for grads in gradients:
            for name, param in module.named_parameters():
                param.grad = from_numpy(grads[name]).to(param) if name in grads and param.requires_grad else None
            step()
            states.append(_parameters(module))
        return tuple(states)

    def train(self, values: Arrays, batches: Sequence[Any], dtype: str) -> Trajectory:
        """See `Side`."""
        module = self.module(values, dtype, fresh=True)
        step = self._stepper(module)
        losses, parameters, buffers = [], [], []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for batch in batches:
                module.zero_grad()
                loss, _ = self.call(module, self.batch(batch, dtype))
                loss.backward()
                step()
                losses.append(float(loss.detach()))
                parameters.append(_parameters(module))
                saved = tensors_of(module)
                buffers.append({n: to_numpy(t) for n, t in saved.items() if not isinstance(t, nn.Parameter)})
        return Trajectory(tuple(losses), tuple(parameters), tuple(buffers))

    def _stepper(self, module: nn.Module) -> Stepper:
        if self.optimizer is None:
            raise EquivalenceError("the torch side has no optimizer; give TorchSide(..., optimizer=...)")
        return stepper_of(self.optimizer(module))

    def info(self) -> SideInfo:
        """See `Side`."""
        params = list(self.model.parameters())
        flags = {
            "float32 matmul precision": torch.get_float32_matmul_precision(),
            "TF32 in cuDNN": str(torch.backends.cudnn.allow_tf32),
            "deterministic": str(torch.are_deterministic_algorithms_enabled()),
            "threads": str(torch.get_num_threads()),
            "mode": "training" if self.model.training else "evaluation",
        }
        return SideInfo(
            framework="torch",
            versions={"torch": torch.__version__, "unified_ddp": unified_ddp.__version__},
            flags=flags,
            devices=tuple(sorted({str(p.device) for p in params})),
            parameters=sum(p.numel() for p in params),
            tensors=len(params),
        )


def gradients_of(module: nn.Module, loss: Tensor) -> tuple[Arrays, list[str]]:
    """Returns gradients of the trained parameters by name, zeros where none came, and the names of the latter."""
    named = {name: param for name, param in module.named_parameters() if param.requires_grad}
    module.zero_grad()
    loss.backward()
    unused = [name for name, param in named.items() if param.grad is None]
    grads = {n: to_numpy(_dense(p.grad) if p.grad is not None else torch.zeros_like(p)) for n, p in named.items()}
    return grads, unused


def _dense(grad: Tensor) -> Tensor:
    return grad.to_dense() if grad.is_sparse else grad


def _parameters(module: nn.Module) -> Arrays:
    return {name: to_numpy(param) for name, param in module.named_parameters()}


def _reset_other_buffers(module: nn.Module, original: nn.Module) -> None:
    """Buffers that no mapping carries, such as counters, start as the user's do."""
    carried = {id(tensor) for tensor in tensors_of(module).values()}
    ours = dict(original.named_buffers())
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if id(buffer) not in carried:
                buffer.copy_(ours[name])


def _input(array: np.ndarray, dtype: str) -> Tensor:
    tensor = from_numpy(array)
    if tensor.is_complex():
        return tensor.to(torch.complex128 if dtype == "float64" else torch.complex64)
    if tensor.is_floating_point():
        return tensor.to(getattr(torch, dtype))
    return tensor if tensor.dtype is torch.bool else tensor.long()


def _kind(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
