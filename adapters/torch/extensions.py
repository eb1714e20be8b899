"""What `DistributedDataParallel` offers beyond torch's class."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from unified_ddp.errors import MisuseError
from unified_ddp.ranks.control import Does, Event
from unified_ddp.torch.averaging import AveragingModule
from unified_ddp.torch.module.replicas import check_replicas
from unified_ddp.torch.reduction.post_reduction import PostReductionHook


class ExtendedModule(AveragingModule):
    """Adds `sync_gradients`, `check_replicas`, `register_post_reduction_hook` and `set_weight`."""

    def __init__(self, *args: Any) -> None:
        self._steps = 0
        super().__init__(*args)

    @torch._disable_dynamo(recursive=False)
    def call_method(self, method: str, /, *inputs: Any, **kwargs: Any) -> Any:
        """Runs another method of the module through the wrapper, which synchronises as for `forward`.

        Args:
            method: its name, such as "generate_loss".
            inputs: its arguments; moved to the module's device as `forward`'s are.
            kwargs: likewise.

        Returns:
            What the method returns. A backward pass through it reduces the gradients.

        Raises:
            MisuseError: the module has no such method.
        """
        run = getattr(self.module, method, None)
        if not callable(run):
            raise MisuseError(f"the wrapped {type(self.module).__name__} has no method {method!r} to call")
        with torch.autograd.profiler.record_function("DistributedDataParallel.call_method"):
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            with self._inside_ddp_forward():
                output = run(*inputs, **kwargs)
            return self._post_forward(output)

    @torch._disable_dynamo
    def sync_gradients(self) -> None:
        """Reduces every `.grad` as it is now, without a forward or backward pass; every rank calls it.

        For what `no_sync` accumulated, what came through `ddp.module` and what was assigned by hand. A gradient missing
        on some ranks counts as zero; one missing on all stays None. What is equal on all ranks stays as it is, unless
        a comm hook loses precision.

        Raises:
            MisuseError: a backward pass is under way, or ranks without inputs are in a `join` context, where they
                cannot answer this call.
            ReductionError: an exception ended the last backward pass when gradients were half reduced.
        """
        self._refuse_in_join("sync_gradients()")
        does = self._prepares()
        if does:
            self._announce(Event.ACCUMULATED, does)
        self.reducer.core.agree()
        self._follow_changes(does)
        self._before_module(does)
        with self.reducer.errors_noted(), torch.autograd.profiler.record_function("unified_ddp::sync_gradients"):
            self.reducer.reduce_accumulated()

    def _refuse_in_join(self, what: str) -> None:
        if self._join_config.enable:
            raise MisuseError(
                f"{what} cannot be called inside `join`: ranks that have no inputs left do not answer it. Call it "
                "outside"
            )

    def _prepares(self) -> Does:
        """Counts synchronising forwards and calls of `sync_gradients`, and says when it is time to check replicas."""
        does = super()._prepares()
        every = self.options.check_replicas_every
        if every is None or self._join_config.enable:
            return does
        self._steps += 1
        return does if self._steps % every else does | Does.CHECKS_REPLICAS

    def _before_module(self, does: Does) -> None:
        if Does.CHECKS_REPLICAS in does:
            self._check_replicas()

    @torch._disable_dynamo
    def check_replicas(self, *, buffers: bool = False) -> None:
        """Compares the parameters of all ranks, bit by bit; every rank calls it.

        A 64-bit fingerprint a parameter is computed on its device. Ranks exchange 8 bytes, and the fingerprints only if
        those differ. NaNs of the same bits are equal. With `check_replicas_every=N` this is done before every Nth
        step, a step being a synchronising forward or a call of `sync_gradients`, outside `join`, where ranks without
        inputs have not stepped.

        Args:
            buffers: compare the buffers, too, which differ legitimately between two synchronising forwards.

        Raises:
            ReplicaMismatchError: on every rank, naming the first parameter that differs, and the ranks on each side.
            MisuseError: it was called inside `join`.
        """
        self._refuse_in_join("check_replicas()")
        self._announce(Event.CHECK, Does.NOTHING)
        self._check_replicas(buffers)

    def _check_replicas(self, buffers: bool = False) -> None:
        ignored = self.parameters_to_ignore
        kinds = {"parameter": self.module.named_parameters(), "buffer": self.module.named_buffers() if buffers else ()}
        with self.reducer.errors_noted(), torch.no_grad():
            for kind, tensors in kinds.items():
                with self._progress.waiting("check_replicas", f"the comparison of {kind}s"):
                    check_replicas(self._transport, {n: t for n, t in tensors if n not in ignored}, kind)

    def register_post_reduction_hook(
        self, hook: PostReductionHook, params: Iterable[nn.Parameter] | None = None
    ) -> RemovableHandle:
        """Calls `hook(name, param)` whenever the reduced gradient of a parameter is final in `param.grad`.

        That is at the end of each synchronising backward pass and in `sync_gradients`, bucket by bucket in launch
        order, while later buckets are still being reduced; with gradients disabled. Not for parameters that no rank
        used, whose `.grad` the reduction leaves alone. A hook may step an optimizer and set `.grad` to None.

        If a hook raises, the reduction is completed without calling hooks any more and the exception then comes out of
        `backward` (or `sync_gradients`): all gradients are reduced, and the next iteration works.

        Args:
            hook: called with the parameter's name in the wrapped module, and the parameter.
            params: the parameters to call it for; None means all that are reduced.

        Returns:
            A handle with `remove()`.

        Raises:
            ValueError: one of `params` is not reduced.
        """
        if params is None:
            return self._post_reduction.register(hook, None)
        known = {id(p): name for name, p in zip(self.reducer.names, self.reducer.params, strict=True)}
        wanted = list(params)
        for position, param in enumerate(wanted):
            if id(param) not in known:
                raise ValueError(
                    f"params[{position}], of shape {tuple(param.shape)}, is not reduced: it is frozen, ignored, or "
                    "no parameter of the module"
                )
        return self._post_reduction.register(hook, [known[id(p)] for p in wanted])

    def set_weight(self, weight: float) -> None:
        """Sets this rank's weight w in the iteration's reduction, with `reduction="weighted_mean"`.

        Gradients become sum(w_r g_r) / sum(w_r) over the ranks r, where g_r is everything that rank r accumulated since
        the last reduction, also under `no_sync`. If rank r's losses of these microbatches add up to its mean loss over
        w_r tokens, that is the gradient of the mean loss over all tokens: divide the summed loss of each microbatch by
        w_r, the tokens of all of them. A weight of 0 leaves this rank's gradients out, even if they are NaN.

        The weight is used by all reductions of one iteration, and dropped by the next synchronising forward: set it
        before or after the forward, on every rank, in every iteration. Without a weight, or if all are 0, the backward
        pass raises `ReductionError` on every rank and reduces nothing.

        Args:
            weight: finite and not negative; on accelerators better no tensor, as it is read on the host.

        Raises:
            TypeError, ValueError: it is no such number.
            MisuseError: the wrapper was constructed with another `reduction`.
        """
        self.reducer.scaling.set_weight(weight)
