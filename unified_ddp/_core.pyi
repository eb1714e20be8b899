"""
The native core of unified_ddp. It holds names, dtypes, shapes and indices, never tensors.

Parameters and buckets are named by their index: parameters in registration order, buckets in launch order.
"""

from collections.abc import Callable, Sequence
import enum


class UnifiedDDPError(Exception):
    """Base of all named errors."""

class PlanError(UnifiedDDPError, ValueError):
    """A schema or bucket plan cannot be made from what was given."""

class ReadinessError(UnifiedDDPError, RuntimeError):
    """
    A gradient came, or a call was made, that the state of the backward pass does not allow.
    """

class ParamSpec:
    """
    What the core knows of one parameter; never its values. Equal if every field is; hashable; can be pickled.
    """

    def __init__(self, name: str, shape: Sequence[int], dtype: str, *, strides: Sequence[int] = (), device: str = 'cpu', trainable: bool = True, sparse: bool = False) -> None:
        """
        Describes a parameter.

        Args:
            name: full path, unique in a plan.
            shape: extents, each 0 or more.
            dtype: canonical numpy or ml_dtypes name, such as `float32` or `bfloat16`.
            strides: in elements, one a dimension; empty means row-major.
            device: kind of device, such as `cpu` or `cuda:0`; parameters of two devices share no bucket.
            trainable: whether it gets gradients.
            sparse: whether its gradient is sparse; then it is alone in its bucket.

        Raises:
            PlanError: the dtype is unknown, an extent is negative, strides and shape differ in length, or the parameter is
                larger than 2^63 bytes.
        """

    @property
    def name(self) -> str:
        """Full path, unique in a plan."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents."""

    @property
    def dtype(self) -> str:
        """Canonical numpy or ml_dtypes name."""

    @property
    def strides(self) -> tuple[int, ...]:
        """In elements."""

    @property
    def device(self) -> str:
        """Kind of device."""

    @property
    def trainable(self) -> bool:
        """Whether it gets gradients."""

    @property
    def sparse(self) -> bool:
        """Whether its gradient is sparse; then it is alone in its bucket."""

    @property
    def numel(self) -> int:
        """Number of elements."""

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""

    def __eq__(self, other: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __getstate__(self) -> tuple[str, list[int], str, list[int], str, bool, bool]: ...

    def __setstate__(self, arg: tuple[str, Sequence[int], str, Sequence[int], str, bool, bool], /) -> None: ...

    def __repr__(self) -> str: ...

def schema_fingerprint(params: Sequence[ParamSpec]) -> int:
    """
    Returns 64 bits of names, shapes, dtypes and trainable flags, whatever the order of the parameters.
    """

def itemsize_of(dtype: str) -> int:
    """
    Returns the bytes of one element of a dtype, by its numpy or ml_dtypes name; 0 if unknown.
    """

class BucketSpec:
    """
    One bucket: parameters of one dtype and device, side by side in its storage.
    """

    @property
    def params(self) -> tuple[int, ...]:
        """Indices into the plan's parameters, in order of storage."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each of `params` begins in the storage, in elements."""

    @property
    def numel(self) -> int:
        """Elements of the storage."""

    @property
    def nbytes(self) -> int:
        """Bytes of the storage."""

    @property
    def cap(self) -> int:
        """The cap under which it was planned, in bytes; 0 if none."""

    @property
    def dtype(self) -> str:
        """Canonical numpy or ml_dtypes name."""

    @property
    def device(self) -> str:
        """Kind of device."""

    @property
    def sparse(self) -> bool:
        """Whether its one parameter's gradient is sparse."""

    def __repr__(self) -> str: ...

class BucketPlan:
    """
    Which parameters are reduced together, in which order.

    Cannot be changed. Equal if parameters, buckets and caps are; hashable; can be pickled.
    """

    def __init__(self, params: Sequence[ParamSpec], buckets: Sequence[Sequence[int]], caps: Sequence[int] | None = None) -> None:
        """
        Makes a plan of given buckets; `plan_buckets` fills them by DDP's rules.

        Args:
            params: in registration order.
            buckets: indices into `params`, in launch order; each index stands in exactly one bucket.
            caps: bytes, one a bucket; kept for the record.

        Raises:
            PlanError: names are not unique, a bucket is empty or mixes dtypes or devices, a sparse parameter is not alone, or
                a parameter stands in two buckets or in none.
        """

    @property
    def params(self) -> tuple[ParamSpec, ...]:
        """In registration order."""

    @property
    def buckets(self) -> tuple[BucketSpec, ...]:
        """In launch order."""

    @property
    def fingerprint(self) -> int:
        """
        64 bits: equal if the same names, shapes, dtypes and trainable flags lie in the same order and places.

        The same on every platform and in every framework: strides, devices and caps are left out.
        """

    def __eq__(self, other: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __getstate__(self) -> tuple[list[ParamSpec], list[list[int]], list[int]]: ...

    def __setstate__(self, arg: tuple[Sequence[ParamSpec], Sequence[Sequence[int]], Sequence[int]], /) -> None: ...

    def __repr__(self) -> str: ...

def plan_buckets(params: Sequence[ParamSpec], caps: Sequence[int], *, order: Sequence[int] | None = None, reverse: bool = False) -> BucketPlan:
    """
    Fills buckets by the rules of `torch.distributed._compute_bucket_assignment_by_size`.

    Args:
        params: in registration order.
        caps: bytes; parameters of each dtype and device walk through them on their own, and the last one repeats.
        order: indices into `params`, each once, in the order in which they are taken. Buckets then come as they fill.
            None takes them as registered, and sorts buckets by their first parameter.
        reverse: turns the order of the buckets around.

    Raises:
        PlanError: no cap, a negative one, an order that is not a permutation, or names that are not unique.
    """

class Phase(enum.Enum):
    """Where a backward pass stands."""

    IDLE = 0

    ARMED = 1

    ACTIVE = 2

class Readiness:
    """
    Counts the gradients of a backward pass and launches buckets in plan order.

    An error in a callback, and a gradient that comes too late, fail the backward pass: nothing more is launched in it, and
    only `abort` ends it.
    """

    def __init__(self, names: Sequence[str], buckets: Sequence[Sequence[int]], eager: Sequence[bool], on_start: Callable[[], object], on_bucket: Callable[[int], object], on_param: Callable[[int], object]) -> None:
        """
        Begins idle.

        Args:
            names: of the parameters, for errors.
            buckets: indices of parameters, in launch order; each index stands in exactly one bucket.
            eager: by parameter, whether `on_param` is to hear of it.
            on_start: a gradient came while armed; calls `begin` if this backward pass is to be reduced.
            on_bucket: is to launch the bucket of the given index.
            on_param: the gradient of the given eager parameter came, and its bucket is not launched.

        The garbage collector does not see what is held here, so the callables must own no reducer.

        Raises:
            PlanError: `eager` has another length, or a parameter stands in two buckets or in none.
        """

    @property
    def phase(self) -> Phase:
        """Where the backward pass stands."""

    @property
    def launched(self) -> int:
        """Number of buckets launched in this backward pass or the last."""

    @property
    def order(self) -> tuple[int, ...]:
        """
        Parameters in the order of their first gradients in this backward pass or the last.
        """

    @property
    def seen_count(self) -> int:
        """Number of parameters in `order`."""

    def touched(self, param: int) -> bool:
        """Returns whether a gradient came that is not reduced yet."""

    def seen(self, param: int) -> bool:
        """Returns whether a gradient came in this backward pass or the last."""

    def rebucket(self, buckets: Sequence[Sequence[int]]) -> None:
        """
        Takes other buckets over the same parameters.

        Raises:
            PlanError: a parameter stands in two buckets or in none.
            ReadinessError: a backward pass is under way.
        """

    def arm(self) -> None:
        """Lets the next gradient start a backward pass, through `on_start`."""

    def disarm(self) -> None:
        """Lets gradients accumulate without being reduced."""

    def begin(self, arrival: bytes | None = None) -> None:
        """
        Starts a backward pass.

        Args:
            arrival: one byte a parameter: 0 it may come, any number of times; 1 it comes exactly once. None means 0 for all.

        Raises:
            ReadinessError: one is under way, or `arrival` has another length or value.
        """

    def mark(self, param: int) -> None:
        """
        Says that a gradient was accumulated.

        Raises:
            ReadinessError: its bucket was launched before, or it is eager and came twice.
        """

    def hook(self, param: int) -> Callable[[object], None]:
        """
        Returns a native callable of one argument, not None, that marks `param`. It keeps this object alive.
        """

    def flush(self) -> None:
        """
        Launches what is left, in order.

        Raises:
            ReadinessError: no backward pass is under way, or an error was met in it.
        """

    def end(self) -> None:
        """
        Ends the backward pass; what was touched no longer is.

        Raises:
            ReadinessError: no backward pass is under way, an error was met in it, or a bucket was not launched.
        """

    def abort(self) -> None:
        """
        Gives the backward pass up, if there is one; what was touched stays so.
        """
