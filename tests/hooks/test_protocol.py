"""What a hook is given."""

import pytest

from unified_ddp import MisuseError
from unified_ddp.hooks import BucketLayout, TopK
from unified_ddp.hooks.protocol import work_dtype


def layout(dtype: str) -> BucketLayout:
    return BucketLayout(3, dtype, ("w", "b"), ((2, 3), ()))


def test_sizes_of_a_bucket() -> None:
    assert (layout("float32").sizes, layout("float32").numel) == ((6, 1), 7)


@pytest.mark.parametrize(
    ("dtype", "work"),
    [("float16", "float32"), ("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")],
)
def test_narrow_gradients_are_worked_on_in_float32(dtype: str, work: str) -> None:
    assert work_dtype(layout(dtype), TopK()) == work


@pytest.mark.parametrize("dtype", ["complex64", "int32"])
def test_what_is_no_real_number_is_refused(dtype: str) -> None:
    message = (
        rf"TopK reduces real floating-point gradients, but bucket 3 \(w, ...\) holds {dtype}; use AllReduce for a "
        "model with such parameters"
    )
    with pytest.raises(MisuseError, match=message):
        TopK().init(layout(dtype))
