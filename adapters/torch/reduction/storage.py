"""The flat memory of one bucket, and the views of it that stand for the parameters' gradients."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from unified_ddp.errors import CommHookError, ReductionError
from unified_ddp.passes import BucketState
from unified_ddp.plan import BucketSpec

Context = Mapping[torch.Tensor, torch.Tensor]
"""Gradients by parameter, where a pass reduces others than `.grad`, in place."""


def _grad(param: torch.Tensor) -> torch.Tensor | None:
    return param.grad


def scale_gradient(param: torch.Tensor, factor: float) -> None:
    """Scales a parameter's `.grad` in place; one that is part of a graph (create_graph) is replaced."""
    grad = param.grad
    if grad is not None and (grad.requires_grad or _overlaps(grad)):
        param.grad = grad * factor
    elif grad is not None:
        grad.mul_(factor)


@dataclass(frozen=True)
class LocalGradients:
    """This rank's gradients: those in `.grad`, if nothing else is said."""

    of: Callable[[torch.Tensor], torch.Tensor | None] = _grad
    """Returns a parameter's gradient."""
    scale: Callable[[torch.Tensor, float], None] = scale_gradient
    """Scales it by a factor."""


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
        self._memory = range(self.flat.data_ptr(), self.flat.data_ptr() + self.flat.nbytes)
        # What `mark_present` writes to, in elements of `_parts(self.flat)`.
        width = 2 if self.flat.is_complex() else 1
        sizes = zip(spec.offsets, self.params, strict=True)
        self._firsts = [offset * width if param.numel() else None for offset, param in sizes]
        self._all_firsts = self._first_elements(())

    def gradient(self, position: int, context: Context | None = None) -> torch.Tensor | None:
        """Returns the gradient to pack."""
        param = self.params[position]
        return param.grad if context is None else context.get(param)

    def pack_one(self, position: int, scale: float, state: BucketState) -> None:
        """Packs one gradient at once and scales it."""
        view = self.views[position]
        with torch.no_grad():
            grad = self.gradient(position)
            if grad is None:
                self._mark_absent(position, state)
            elif scale == 0.0:
                view.zero_()  # not 0 times the gradient, which may not be finite
            elif grad.is_sparse or grad.dtype != view.dtype:
                _parts(view.copy_(grad.to_dense())).mul_(scale)
            elif scale == 1.0:
                if (source := self._to_copy(grad, view)) is not None:
                    view.copy_(source)
            else:
                source = self._to_copy(grad, view)
                torch.mul(_parts(_plain(view if source is None else source)), scale, out=_parts(view))
            self._become_view(position, grad)
        state.packed.add(position)

    def pack_rest(self, scale: float, state: BucketState, context: Context | None = None) -> None:
        """Packs the gradients not packed yet, fused, and scales them. A missing gradient counts as zero."""
        if len(state.packed) < len(self.params):
            rest = [i for i in range(len(self.params)) if i not in state.packed] if state.packed else None
            with torch.no_grad():
                self._pack_fused(rest, scale, state, context)

    def _pack_fused(
        self, positions: list[int] | None, scale: float, state: BucketState, context: Context | None
    ) -> None:
        into, copied = [], []
        for i in positions if positions is not None else range(len(self.params)):
            view, grad = self.views[i], self.gradient(i, context)
            if grad is None:
                self._mark_absent(i, state)
                continue
            if scale == 0.0:
                view.zero_()
            elif (source := grad.to_dense() if grad.is_sparse else self._to_copy(grad, view)) is not None:
                into.append(view)
                copied.append(source)
            else:
                continue
            if context is None:
                self._become_view(i, grad)
        if into:
            torch._foreach_copy_(into, copied)
        if scale not in (0.0, 1.0):
            if positions is None:
                _parts(self.flat).mul_(scale)
            else:
                torch._foreach_mul_([_parts(self.views[i]) for i in positions], scale)

    def _to_copy(self, grad: torch.Tensor, view: torch.Tensor) -> torch.Tensor | None:
        """Returns what is to be copied to a view; None if the gradient is there already."""
        if grad is view:
            return None
        if grad.data_ptr() not in self._memory:
            return grad
        if _same_memory(grad, view) and grad.stride() == view.stride() and not (grad.is_conj() or grad.is_neg()):
            return None
        return grad.clone()  # made of the view of another parameter, or of this one's elements in another order

    def _become_view(self, position: int, grad: torch.Tensor | None) -> None:
        """Frees the packed gradient's own memory now, not at the end of the pass, if `.grad` is to be a view."""
        if self.as_views and grad is not None and not grad.requires_grad:
            self.params[position].grad = self.views[position]

    def _mark_absent(self, position: int, state: BucketState) -> None:
        """Packs a missing gradient as -0.0, which a sum leaves only if every rank packed it."""
        _parts(self.views[position]).fill_(-0.0)
        state.absent.add(position)

    def mark_present(self, state: BucketState) -> None:
        """Packs no -0.0 first in a gradient that is there, so that it is not taken for one that is missing.

        The first element of a sum is then -0.0 only if every rank marked it so, whatever the others are.
        """
        firsts = self._first_elements(state.absent) if state.absent else self._all_firsts
        parts = _parts(self.flat).view(-1)
        parts.index_add_(0, firsts, parts.new_zeros(firsts.numel()))

    def _first_elements(self, without: Collection[int]) -> torch.Tensor:
        firsts = [first for i, first in enumerate(self._firsts) if first is not None and i not in without]
        return torch.tensor(firsts, dtype=torch.int64, device=self.flat.device)

    def _left_alone(self, views: Sequence[torch.Tensor], keep: Collection[int], state: BucketState) -> Collection[int]:
        """Returns the positions of `keep` and those without a gradient on any rank."""
        if not state.absent:
            return keep
        nowhere = {i for i in state.absent if _all_negative_zero(views[i])}
        state.lent = state.absent - nowhere
        return nowhere.union(keep)

    def unpack(
        self, reduced: torch.Tensor, keep: Collection[int], state: BucketState, context: Context | None = None
    ) -> Collection[int]:
        """Makes `reduced` the gradients, and returns the positions whose `.grad` is reduced now.

        Args:
            reduced: flat, of the storage's length: the storage itself, or what a comm hook made of it.
            keep: positions whose `.grad` is left as it is: nobody used these parameters.
            state: the bucket's, in this pass.
            context: gradients to write to, instead of `.grad`.
        """
        reduced = self.checked(reduced)
        views = self.views if _same_memory(reduced, self.flat) else gradient_views(reduced, self.spec, self.params)
        with torch.no_grad():
            left = self._left_alone(views, keep, state)
            positions = [i for i in range(len(self.params)) if i not in left] if left else range(len(self.params))
            if context is not None:
                self._write_context(context, views, positions)
                return ()
            if self.as_views:
                self._install_views(reduced, positions)
            else:
                self._copy_out(views, positions)
        return positions

    def checked(self, reduced: torch.Tensor) -> torch.Tensor:
        """Returns `reduced`, flat.

        Raises:
            CommHookError: a comm hook returned a tensor of another size.
        """
        reduced = reduced.reshape(-1)
        if reduced.numel() != self.flat.numel():
            raise CommHookError(
                f"the comm hook returned {reduced.numel()} elements for a bucket of {self.flat.numel()} with "
                f"parameters of shapes {[tuple(p.shape) for p in self.params]}; it must return a tensor shaped as "
                "bucket.buffer()"
            )
        return reduced

    def _write_context(self, context: Context, views: Sequence[torch.Tensor], positions: Collection[int]) -> None:
        for i in positions:
            grad = context.get(self.params[i])
            if grad is None:
                raise missing_in_context(self.params[i])
            grad.copy_(views[i])

    def _install_views(self, reduced: torch.Tensor, positions: Collection[int]) -> None:
        if not _same_memory(reduced, self.flat):
            self.flat.copy_(reduced)
        for i in positions:
            grad, view = self.params[i].grad, self.views[i]
            if grad is None or not grad.requires_grad:
                if grad is not view:
                    self.params[i].grad = view
            else:
                grad.data = view.clone()

    def _copy_out(self, views: Sequence[torch.Tensor], positions: Collection[int]) -> None:
        into, copied = [], []
        for i in positions:
            param, grad = self.params[i], self.params[i].grad
            if grad is None or grad.is_sparse:
                param.grad = torch.empty_like(param, requires_grad=False)
                grad = param.grad
            if grad.requires_grad:
                # create_graph: new data under the same tensor leaves what its graph saved untouched
                grad.data = views[i].clone()
            elif not grad.is_contiguous() and _overlaps(grad):
                param.grad = views[i].clone()
            else:
                into.append(grad)
                copied.append(views[i])
        if into:
            _copy_all(into, copied)


def _copy_all(into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    try:
        torch._foreach_copy_(into, values)
    except RuntimeError:
        # Lazy conjugates and negatives cannot be written to together; to look for them first would cost every pass.
        for gradient, value in zip(into, values, strict=True):
            gradient.copy_(value)


def missing_in_context(param: torch.Tensor) -> ReductionError:
    """Returns the error for a parameter whose reduced gradient has no place in a context."""
    return ReductionError(
        f"a parameter of shape {tuple(param.shape)} has a gradient on another rank and none in this rank's distributed "
        "autograd context, where it cannot be added; use it on every rank"
    )


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or (a.data_ptr() == b.data_ptr() and a.numel() == b.numel() != 0 and a.dtype == b.dtype)


def _plain(grad: torch.Tensor) -> torch.Tensor:
    """A gradient whose memory holds its values: no lazy conjugate or negative."""
    return grad.resolve_conj().resolve_neg()


def _overlaps(grad: torch.Tensor) -> bool:
    """Whether elements may share memory, as those of an expanded tensor do, and cannot be written to one by one."""
    span = 0
    for stride, extent in sorted((s, e) for s, e in zip(grad.stride(), grad.shape, strict=True) if e > 1):
        if stride <= span:
            return True
        span += stride * (extent - 1)
    return False


def _parts(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor as its real and imaginary parts: a product of complex numbers loses the signs of zeros."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _all_negative_zero(tensor: torch.Tensor) -> bool:
    parts = _parts(tensor)
    return bool(((parts == 0) & torch.signbit(parts)).all())
