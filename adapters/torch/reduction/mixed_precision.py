"""Mixed precision: forward and backward in `param_dtype`, reduction in `reduce_dtype`, the rest in full precision.

Parameters are low-precision copies from the forward to the end of its backward pass. Gradients accumulated before
(under no_sync, or not zeroed) are set aside in full precision meanwhile, not rounded, and take part in the reduction.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.utils import _cast_forward_inputs

from unified_ddp.passes import BucketState
from unified_ddp.plan import BucketSpec
from unified_ddp.torch.reduction.storage import BucketStorage, Context, gradient_views, scale_gradient


class MixedPrecision:
    """Lowers and restores the parameters of one module.

    Args:
        config: torch's `_MixedPrecision`; a dtype of None leaves that part as it is.
        params: trainable and frozen; only floating-point ones are touched.
        buffers: cast to `buffer_dtype` for good.
    """

    def __init__(self, config: Any, params: Iterable[nn.Parameter], buffers: Iterable[torch.Tensor]) -> None:
        self.config = config
        self._params = [p for p in params if p.is_floating_point()]
        self._held: dict[torch.Tensor, torch.Tensor] = {}
        self._lowered = False
        for buffer in buffers:
            if config.buffer_dtype is not None and buffer.is_floating_point():
                buffer.data = buffer.to(config.buffer_dtype)
        for param in self._params:
            param._fp_param = param.data  # type: ignore[attr-defined]
            self._forget_low(param)

    def storage_dtype(self, param: torch.Tensor) -> torch.dtype:
        """Returns the dtype in which a parameter's gradient is reduced."""
        if not param.is_floating_point():
            return param.dtype
        return self.config.reduce_dtype or self.config.param_dtype or param.dtype

    def cast_inputs(self, inputs: Any, kwargs: Any) -> tuple[Any, Any]:
        """Casts floating-point inputs of the module to `param_dtype`."""
        return _cast_forward_inputs(self.config.param_dtype, *inputs, **kwargs)

    def lower(self) -> None:
        """Puts low-precision copies in the place of the parameters, before a forward."""
        self.restore()
        if self.config.param_dtype is None:
            return
        with torch.no_grad():
            for param in self._params:
                if param.grad is not None:
                    self._held[param] = param.grad
                    param.grad = None
                param._fp_param = param.data  # type: ignore[attr-defined]
                param._mp_param = param.data.to(self.config.param_dtype)  # type: ignore[attr-defined]
                param.data = param._mp_param  # type: ignore[attr-defined]
        self._lowered = True

    def restore(self) -> None:
        """Puts the parameters back, after a backward pass; gradients left in low precision come along."""
        if self._lowered:
            for param in self._params:
                self.restore_param(param, self.gradient(param))
            self._held.clear()
            self._lowered = False

    def restore_param(self, param: torch.Tensor, grad: torch.Tensor | None) -> None:
        """Puts one parameter back, with this gradient in its own dtype."""
        param.grad = None
        param.data = param._fp_param  # type: ignore[attr-defined]
        self._held.pop(param, None)
        self._forget_low(param)
        param.grad = grad if grad is None else grad.to(param.dtype)

    def gradient(self, param: torch.Tensor) -> torch.Tensor | None:
        """Returns the gradient accumulated so far, what was set aside included."""
        held, grad = self._held.get(param), param.grad
        if held is None or grad is None:
            return grad if held is None else held
        return held + grad.to(held.dtype)

    def scale_gradient(self, param: torch.Tensor, factor: float) -> None:
        """Scales the gradient accumulated so far, what was set aside included."""
        scale_gradient(param, factor)
        if param in self._held:
            self._held[param] = self._held[param] * factor

    def _forget_low(self, param: torch.Tensor) -> None:
        param._mp_param = torch.empty(0, dtype=self.config.param_dtype or param.dtype, device=param.device)  # type: ignore[attr-defined]


class MixedBucketStorage(BucketStorage):
    """A bucket in the reduction's dtype; unpacking puts parameters back into full precision."""

    def __init__(self, spec: BucketSpec, params: Sequence[torch.Tensor], mixed: MixedPrecision) -> None:
        super().__init__(spec, params, as_views=False, dtype=mixed.storage_dtype(params[0]))
        self._mixed = mixed

    def gradient(self, position: int, context: Context | None = None) -> torch.Tensor | None:
        """Returns the gradient to pack."""
        return self._mixed.gradient(self.params[position])

    def unpack(
        self, reduced: torch.Tensor, keep: Collection[int], state: BucketState, context: Context | None = None
    ) -> Collection[int]:
        """Makes `reduced` the gradients, in the parameters' own dtype; returns the positions that it did so for."""
        with torch.no_grad():
            views = gradient_views(self.checked(reduced), self.spec, self.params)
            left = self._left_alone(views, keep, state)
            for position, param in enumerate(self.params):
                grad = self.gradient(position) if position in left else views[position].clone()
                self._mixed.restore_param(param, grad)
        return [i for i in range(len(self.params)) if i not in left]
