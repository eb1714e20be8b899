"""Names of parametrised cases that are the same in every process that collects the tests."""

import re


def named(value: object) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))
