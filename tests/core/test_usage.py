"""Which parameters an iteration used, and what is said of those that it should have."""

import pytest

from unified_ddp import UnusedParameterError
from unified_ddp.usage import Usage

NAMES = ("a", "b", "c")
UNUSED = (
    "Some parameters were not used in producing the loss. .* passing the keyword argument `find_unused_parameters=True`"
)


def usage(find_unused: bool = False, static: bool = False, exempt: tuple[int, ...] = ()) -> Usage:
    return Usage(NAMES, exempt, find_unused=find_unused, static=static, hint=lambda: "\nMORE")


def iterate(one: Usage, *used: list[int], counts: list[int] | None = None) -> None:
    for params in used:
        one.add(params, counts)
        one.next_iteration(0)


def test_a_parameter_without_a_gradient_is_named_at_the_next_iteration() -> None:
    one = usage()
    one.add([0, 2], None)
    assert one.unused == [1]
    with pytest.raises(UnusedParameterError, match=f"(?s)Expected to have finished reduction.*{UNUSED}") as caught:
        one.next_iteration(3)
    for line in (
        "Parameter indices which did not receive grad for rank 3: 1",
        "Parameters which did not receive grad for rank 3: b",
        "No rank had a gradient for: b",
        "MORE",
    ):
        assert line in str(caught.value).splitlines()


def test_what_other_ranks_had_is_said() -> None:
    one = usage()
    one.add([0], None, incomplete=lambda: ([], [2]))
    with pytest.raises(UnusedParameterError) as caught:
        one.require_covered(0)
    lines = str(caught.value).splitlines()
    assert "Other ranks had a gradient for: c" in lines
    assert "No rank had a gradient for: b" in lines


@pytest.mark.parametrize(
    ("one", "passes"),
    [
        (usage(find_unused=True), [[0]]),
        (usage(exempt=(1,)), [[0, 2]]),
        (usage(), [[0], [1, 2]]),  # several backward passes together
    ],
    ids=["find_unused", "exempt", "several"],
)
def test_what_may_be_unused(one: Usage, passes: list[list[int]]) -> None:
    for params in passes:
        one.add(params, None)
    one.next_iteration(0)
    assert one.iterations == 1


def test_frozen_now_and_joined_ranks_are_excused() -> None:
    one = usage()
    one.add([0, 2], None, incomplete=lambda: ([1], []))
    one.next_iteration(0)
    one.add([], None, shadow=True)
    one.next_iteration(0)
    assert one.iterations == 2


def test_the_first_iteration_of_a_static_graph_tells_the_others() -> None:
    one = usage(static=True)
    assert one.needs_counts
    iterate(one, [0, 2], counts=[2, 0, 1])
    assert one.known == [2, 0, 1]
    assert not one.is_asked
    iterate(one, [0, 2])
    one.add([0], None)
    with pytest.raises(UnusedParameterError, match=r"(?s)your training graph has changed.*for rank 1: c"):
        one.next_iteration(1)


def test_a_static_graph_that_uses_more_is_named_at_once() -> None:
    one = usage(static=True)
    iterate(one, [0, 2], counts=[2, 0, 2])
    message = "Your training graph has changed in this iteration: parameters that the first iteration did not use got a"
    with pytest.raises(UnusedParameterError, match=f"{message} gradient. .* Parameters: b"):
        one.add([0, 1, 2], None)
    with pytest.raises(UnusedParameterError, match="did not receive grad for rank 0 in the first iteration: b"):
        one.next_iteration(0)


def test_patterns_and_restart() -> None:
    one = usage(find_unused=True)
    iterate(one, [0], [0])
    assert one.never_changed
    iterate(one, [0, 1])
    assert not one.never_changed
    one.restart()
    assert (one.never_changed, one.iterations, one.under_way) == (True, 0, False)
