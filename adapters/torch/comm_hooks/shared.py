"""Hooks of `unified_ddp.hooks` on our DistributedDataParallel: their collectives, futures and state."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from unified_ddp.errors import MisuseError
from unified_ddp.hooks.collectives import Gather, Steps, Sum
from unified_ddp.hooks.protocol import BucketLayout, HookBucket, SharedHook, State
from unified_ddp.torch.comm_hooks.ops import TorchOps
from unified_ddp.torch.reduction.bucket import GradBucket
from unified_ddp.torch.schema import dtype_name


class HookState:
    """A shared hook and what it remembers of each bucket: `ddp.register_comm_hook(HookState(hook), shared_hook)`.

    It can be copied and pickled between backward passes; the process group is then left behind, and a copy uses the
    default one.

    Args:
        hook: such as `unified_ddp.hooks.PowerSGD(rank=2)`.
        process_group: of the wrapped module; None means the default one.
    """

    def __init__(self, hook: SharedHook, process_group: dist.ProcessGroup | None = None) -> None:
        if not isinstance(hook, SharedHook):
            raise TypeError(f"HookState takes a hook of unified_ddp.hooks, not {hook!r}")
        self.hook = hook
        self.process_group = process_group
        self._held: dict[tuple[str, ...], tuple[BucketLayout, State]] = {}
        self._pending: list[_Rounds] = []

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"process_group": None, "_pending": []}

    def start(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Begins to reduce a bucket."""
        layout = _layout(bucket)
        group = self.process_group if self.process_group is not None else dist.group.WORLD
        assert group is not None
        buffer = bucket.buffer()
        ops = TorchOps(buffer.device)
        state = self._state(layout, ops)
        view = HookBucket(layout, buffer, dist.get_world_size(group), ops)

        def ended(after: State) -> None:
            self._held[layout.names] = layout, after

        rounds = _Rounds(self.hook(state, view), group, self._pending, ended, buffer.device)
        rounds.advance()
        return rounds

    def _state(self, layout: BucketLayout, ops: TorchOps) -> State:
        if layout.names in self._held:
            return self._held[layout.names][1]
        # Buckets were planned anew: what was remembered of a parameter goes with it.
        names = set(layout.names)
        sources = [held for key, held in self._held.items() if not names.isdisjoint(key)]
        state = self.hook.carry(ops, layout, _as_tensors(self.hook.init(layout), ops), sources)
        self._held[layout.names] = layout, state
        newest = {name: key for key in self._held for name in key}  # of keys in the order in which they came
        self._held = {key: held for key, held in self._held.items() if any(newest[name] == key for name in key)}
        return state


def shared_hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduces a bucket by the hook in `state`; the comm hook to register.

    Raises:
        MisuseError: the hook cannot reduce such a bucket.
    """
    return state.start(bucket)


def _layout(bucket: GradBucket) -> BucketLayout:
    if bucket.buffer().is_sparse:
        raise MisuseError(
            f"bucket {bucket.index()} ({', '.join(bucket.names())}) is a sparse gradient, which hooks of "
            "unified_ddp.hooks cannot reduce; make the embedding dense (sparse=False)"
        )
    shapes = tuple(_shape_in_storage(p) for p in bucket.parameters())
    return BucketLayout(bucket.index(), dtype_name(bucket.buffer().dtype), bucket.names(), shapes)


def _shape_in_storage(param: torch.Tensor) -> tuple[int, ...]:
    """The dimensions in the order in which they lie in the bucket, which keeps the strides of parameters."""
    strides = param.stride()
    order = sorted(range(param.dim()), key=lambda i: -strides[i])  # stable, so row-major stays as it is
    return tuple(param.shape[i] for i in order)


def _as_tensors(tree: Any, ops: TorchOps) -> Any:
    if isinstance(tree, dict):
        return {key: _as_tensors(value, ops) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_as_tensors(value, ops) for value in tree]
    # Numbers stay on the host, where a hook may ask for them without waiting for a device.
    return ops.from_numpy(tree) if tree.ndim else torch.tensor(tree)


class _Rounds(torch.futures.Future):
    """A hook under way. Its next collective is launched when it is waited for, together with those of all hooks under
    way, in the order of buckets: callbacks of collectives would launch them in an order of each rank's own.
    """

    def __init__(
        self,
        steps: Steps,
        group: dist.ProcessGroup,
        pending: "list[_Rounds]",
        ended: Callable[[State], None],
        device: torch.device,
    ) -> None:
        super().__init__(devices=None if device.type == "cpu" else [device])
        self._steps, self._group, self._pending, self._ended = steps, group, pending, ended
        self._collective: tuple[dist.Work, torch.Tensor] | None = None
        pending.append(self)

    def advance(self) -> None:
        """Takes the collective's result to the hook and launches the next one, or ends."""
        try:
            answer = None
            if self._collective is not None:
                work, answer = self._collective
                work.wait()
            self._collective = _launch(self._steps.send(answer), self._group)
        except StopIteration as stop:
            self._pending.remove(self)
            reduced, after = stop.value
            self._ended(after)
            self.set_result(reduced)
        except Exception as error:  # to be raised by `wait`; another bucket's may be what calls this
            self._pending.remove(self)
            self.set_exception(error)

    def _finish(self) -> None:
        while self in self._pending:
            for rounds in list(self._pending):
                rounds.advance()

    def wait(self) -> torch.Tensor:
        """Runs the hook to its end and returns the reduced bucket."""
        self._finish()
        return super().wait()

    def value(self) -> torch.Tensor:
        """Returns the reduced bucket, as `wait`."""
        return self.wait()

    def then(self, callback: Callable[[Any], Any]) -> torch.futures.Future:
        """Runs the hook to its end, then the callback."""
        self._finish()
        return super().then(callback)


def _launch(request: Sum | Gather, group: dist.ProcessGroup) -> tuple[dist.Work, torch.Tensor]:
    array = request.array.contiguous()
    if isinstance(request, Sum):
        parts = torch.view_as_real(array) if array.is_complex() else array
        return dist.all_reduce(parts, group=group, async_op=True), array
    every = array.new_empty((dist.get_world_size(group), *array.shape))
    return dist.all_gather_into_tensor(every.flatten(0, 1), array, group=group, async_op=True), every
