"""The flat memory of one bucket, and the views of it that stand for the parameters' gradients."""

from collections.abc import Collection, Sequence

import torch

from unified_ddp.plan import BucketSpec

__all__ = ["BucketStorage", "gradient_views"]


def gradient_views(flat: torch.Tensor, spec: BucketSpec, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns one view of `flat` a parameter, with the parameter's shape.

    Dense parameters keep their strides (channels_last stays channels_last), so that the optimizer meets gradients
    laid out as the parameters; others are row-major.
    """
    views = []
    for offset, param in zip(spec.offsets, params, strict=True):
        if _is_dense(param):
            views.append(flat.as_strided(param.size(), param.stride(), offset))
        else:
            views.append(flat.narrow(0, offset, param.numel()).view(param.size()))
    return views


def _is_dense(tensor: torch.Tensor) -> bool:
    """Non-overlapping and without holes: its elements fill a flat piece of memory in some order of dimensions."""
    expected = 1
    for stride, extent in sorted((s, e) for s, e in zip(tensor.stride(), tensor.shape, strict=True) if e != 1):
        if stride != expected:
            return False
        expected *= extent
    return True


class BucketStorage:
    """Packs the gradients of one bucket's parameters, and unpacks the reduced ones.

    Args:
        spec: the bucket.
        params: its parameters, in storage order, all of one dtype and device.
        as_views: whether `.grad` is to be a view of the storage (gradient_as_bucket_view).
        dtype: element type of the storage; None means the parameters'.
    """

    def __init__(
        self, spec: BucketSpec, params: Sequence[torch.Tensor], as_views: bool, dtype: torch.dtype | None = None
    ) -> None:
        self.spec = spec
        self.params = list(params)
        self.as_views = as_views
        first = self.params[0]
        self.flat = torch.zeros(spec.numel, dtype=dtype or first.dtype, device=first.device)
        self.views = gradient_views(self.flat, spec, self.params)
        self._packed: set[int] = set()

    def pack_one(self, position: int, scale: float) -> None:
        """Packs one gradient at once and scales it."""
        param, view = self.params[position], self.views[position]
        with torch.no_grad():
            grad = param.grad
            if grad is None:
                view.zero_()
            elif grad.is_sparse:
                view.copy_(grad.to_dense()).mul_(scale)
            elif scale == 1.0:
                if not _same_memory(grad, view):
                    view.copy_(grad)
            else:
                torch.mul(grad, scale, out=view)
            if self.as_views and grad is not None and not grad.requires_grad:
                param.grad = view  # frees the gradient's own memory now rather than at the end of the backward pass
        self._packed.add(position)

    def pack_rest(self, scale: float) -> None:
        """Packs the gradients not packed yet, fused, and scales them. A missing gradient counts as zero."""
        if len(self._packed) < len(self.params):
            rest = [i for i in range(len(self.params)) if i not in self._packed] if self._packed else None
            with torch.no_grad():
                self._pack_fused(rest, scale)
        self._packed.clear()

    def _pack_fused(self, positions: list[int] | None, scale: float) -> None:
        views = self.views if positions is None else [self.views[i] for i in positions]
        params = self.params if positions is None else [self.params[i] for i in positions]
        grads = [p.grad for p in params]
        into, copied = [], []
        for view, grad in zip(views, grads, strict=True):
            if grad is None:
                view.zero_()
            elif not _same_memory(grad, view):
                into.append(view)
                copied.append(grad.to_dense() if grad.is_sparse else grad)
        if into:
            torch._foreach_copy_(into, copied)
        if scale != 1.0:
            if positions is None:
                self.flat.mul_(scale)
            else:
                torch._foreach_mul_(views, scale)

    def unpack(self, reduced: torch.Tensor, keep: Collection[int] = ()) -> None:
        """Makes `reduced` the gradients.

        Args:
            reduced: flat, of the storage's length: the storage itself, or what a comm hook made of it.
            keep: positions whose `.grad` is left as it is: nobody used these parameters.
        """
        if reduced.numel() != self.flat.numel():
            raise ValueError(
                f"the comm hook returned {reduced.numel()} elements for a bucket of {self.flat.numel()} with parameters of "
                f"shapes {[tuple(p.shape) for p in self.params]}; it must return a tensor shaped as bucket.buffer()"
            )
        positions = [i for i in range(len(self.params)) if i not in keep] if keep else range(len(self.params))
        with torch.no_grad():
            if self.as_views:
                self._install_views(reduced, positions)
            else:
                self._copy_out(reduced, positions)

    def _install_views(self, reduced: torch.Tensor, positions: Collection[int]) -> None:
        if not _same_memory(reduced, self.flat):
            self.flat.copy_(reduced.view_as(self.flat))
        for i in positions:
            grad, view = self.params[i].grad, self.views[i]
            if grad is None or not grad.requires_grad:
                if grad is not view:
                    self.params[i].grad = view
            else:
                grad.data = view.clone()

    def _copy_out(self, reduced: torch.Tensor, positions: Collection[int]) -> None:
        own = _same_memory(reduced, self.flat)
        views = self.views if own else gradient_views(reduced.reshape(-1), self.spec, self.params)
        into, copied = [], []
        for i in positions:
            param, grad = self.params[i], self.params[i].grad
            if grad is None or grad.is_sparse:
                param.grad = torch.empty_like(param, requires_grad=False)
                grad = param.grad
            if grad.requires_grad:
                # create_graph: new data under the same tensor leaves what its graph saved untouched
                grad.data = views[i].clone()
            else:
                into.append(grad)
                copied.append(views[i])
        if into:
            torch._foreach_copy_(into, copied)


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or (a.data_ptr() == b.data_ptr() and a.numel() == b.numel() != 0 and a.dtype == b.dtype)
