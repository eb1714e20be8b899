"""Ranks, or processes, and names in the words of errors."""

from collections import defaultdict
from collections.abc import Sequence


def ranks_text(ranks: Sequence[int], member: str = "rank") -> str:
    """Returns "rank 1" or "ranks 1, 2".

    Args:
        ranks: which.
        member: what a rank is called.
    """
    plural = "es" if member.endswith("s") else "s"
    return f"{member}{plural * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def shortened(names: Sequence[str], most: int = 12) -> str:
    """Returns the names, the first ones only if there are many: "a, b and 3 more"."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def tell_sides(values: Sequence[str], member: str = "rank") -> str:
    """Returns "this on rank 0, that on ranks 1, 2" for values by rank; empty if they are all equal."""
    ranks = defaultdict(list)
    for rank, value in enumerate(values):
        ranks[value].append(rank)
    if len(ranks) == 1:
        return ""
    return ", ".join(f"{value} on {ranks_text(r, member)}" for value, r in ranks.items())
