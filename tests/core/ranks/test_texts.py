import pytest

from unified_ddp.ranks.texts import ranks_text, shortened, tell_sides


@pytest.mark.parametrize(
    ("ranks", "member", "text"),
    [([1], "rank", "rank 1"), ([0, 2], "rank", "ranks 0, 2"), ([0, 2], "process", "processes 0, 2")],
)
def test_ranks(ranks: list[int], member: str, text: str) -> None:
    assert ranks_text(ranks, member) == text


@pytest.mark.parametrize(("count", "text"), [(0, ""), (2, "a, b"), (3, "a, b, c"), (5, "a, b, c and 2 more")])
def test_names(count: int, text: str) -> None:
    assert shortened(list("abcde")[:count], 3) == text


def test_sides() -> None:
    assert tell_sides(["x", "x"]) == ""
    assert tell_sides(["x", "y", "x"]) == "x on ranks 0, 2, y on rank 1"
    assert tell_sides(["x", "y"], "process") == "x on process 0, y on process 1"
