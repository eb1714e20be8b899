import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unified_ddp import ParamSpec
from unified_ddp.plan import plan_buckets

torch = pytest.importorskip("torch")

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "complex64": torch.complex64,
    "int64": torch.int64,
    "bool": torch.bool,
}
shapes = st.lists(st.integers(0, 12), max_size=4)
params = st.lists(st.tuples(shapes, st.sampled_from(sorted(DTYPES)), st.booleans()), min_size=1, max_size=30)
caps = st.lists(st.integers(0, 3000), min_size=1, max_size=4)


def both(drawn, caps, order):  # type: ignore[no-untyped-def]
    """Returns our buckets and caps, and torch's."""
    specs = [ParamSpec(f"p{i}", shape, dtype, sparse=sparse) for i, (shape, dtype, sparse) in enumerate(drawn)]
    sequence = list(range(len(specs))) if order is None else order
    tensors = [torch.empty(drawn[i][0], dtype=DTYPES[drawn[i][1]]) for i in sequence]
    plan = plan_buckets(specs, caps, order=order)
    theirs, limits = torch._C._distributed_c10d._compute_bucket_assignment_by_size(
        tensors, caps, [sparse for _, _, sparse in drawn], order or []
    )
    ours = [(list(bucket.params), bucket.cap) for bucket in plan.buckets]
    # For a sparse parameter torch's limit is "none"; ours is 0.
    sparse = [drawn[bucket[0]][2] for bucket in theirs]
    return plan, ours, [(b, 0 if s else limit) for b, limit, s in zip(theirs, limits, sparse, strict=True)]


@settings(max_examples=200, deadline=None)
@given(params, caps)
def test_in_registration_order(drawn, caps) -> None:  # type: ignore[no-untyped-def]
    _, ours, theirs = both(drawn, caps, None)
    assert ours == theirs


@settings(max_examples=200, deadline=None)
@given(st.data(), params, caps)
def test_in_a_given_order(data, drawn, caps) -> None:  # type: ignore[no-untyped-def]
    order = data.draw(st.permutations(range(len(drawn))))
    plan, ours, theirs = both(drawn, caps, order)
    # torch takes the buckets that did not fill from a hash table, in no order of its own; ours come by first parameter.
    unfinished = 0
    for bucket in reversed(plan.buckets):
        if bucket.sparse or bucket.nbytes >= bucket.cap:
            break
        unfinished += 1
    done = len(ours) - unfinished
    assert ours[:done] == theirs[:done]
    assert sorted(ours[done:]) == sorted(theirs[done:])
    assert ours[done:] == sorted(ours[done:], key=lambda bucket: order.index(bucket[0][0]))


def test_dtypes_never_mix_and_lists_of_caps_walk_on_their_own() -> None:
    drawn = [([100], "float32", False), ([100], "float64", False)] * 3
    _, ours, theirs = both(drawn, [1, 10**6], None)
    assert ours == theirs == [([0], 1), ([1], 1), ([2, 4], 10**6), ([3, 5], 10**6)]
