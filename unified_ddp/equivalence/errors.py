"""Errors of comparisons: what could not be compared, and what to add so that it can."""

from unified_ddp.errors import UnifiedDDPError


class EquivalenceError(UnifiedDDPError, ValueError):
    """A pair cannot be compared: a side is random, a batch or an output has no counterpart, a child process failed."""


class MappingError(EquivalenceError):
    """A tensor has no counterpart, or several that fit alike. The text says what to add."""


class NotEquivalentError(UnifiedDDPError, AssertionError):
    """A report is not ok; raised by `Report.assert_ok`."""
