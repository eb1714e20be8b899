"""Arguments that cannot be right."""

import math
from typing import Any

from support.models import MLP

from faults.table import row

VALUES: list[tuple[str, Any, str]] = [
    ("bucket_cap_mb", 0, "0"),
    ("bucket_cap_mb", -1, "-1"),
    ("bucket_cap_mb", math.nan, "nan"),
    ("bucket_cap_mb", math.inf, "inf"),
    ("bucket_cap_mb", "25", "25"),
    ("bucket_cap_mb_list", [], "empty"),
    ("bucket_cap_mb_list", [1, 0], "0"),
    ("bucket_cap_mb_list", [1, math.nan], "nan"),
    ("bucket_cap_mb_list", 5, "5"),
    ("bucket_cap_mb_list", ["a"], "a"),
]


def enter(name: str, value: Any, shown: str) -> None:
    words = [name, shown]

    @row(f"{name}={value!r}", "a ValueError or TypeError with the value", errors={0: words, 1: words})
    def bad(ddp_class: Any, rank: int, world_size: int) -> None:
        try:
            ddp_class(MLP(), **{name: value})
        except (TypeError, ValueError):
            raise
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error}") from error


for each in VALUES:
    enter(*each)
