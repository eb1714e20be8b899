"""What a comparison gives: its results, with the ways to show and keep them."""

from dataclasses import dataclass
from pathlib import Path

from unified_ddp.equivalence.errors import NotEquivalentError
from unified_ddp.equivalence.explain import explain
from unified_ddp.equivalence.report.saving import save_report
from unified_ddp.equivalence.report.serial import report_from_json, report_to_json
from unified_ddp.equivalence.results import Results


@dataclass(frozen=True)
class Report(Results):
    """The results of one comparison."""

    def assert_ok(self) -> "Report":
        """Returns itself, or raises NotEquivalentError with `explain()` as its text."""
        if not self.ok:
            raise NotEquivalentError(self.explain())
        return self

    def explain(self) -> str:
        """Returns the ladder, the first failing rung and its worst tensors as plain text."""
        return explain(self)

    def to_json(self) -> str:
        """Returns the report as JSON, in the format of docs/equivalence-report.schema.json."""
        return report_to_json(self)

    @staticmethod
    def from_json(text: str) -> "Report":
        """Returns the report that `to_json` wrote.

        Raises:
            EquivalenceError: it is no such text.
        """
        return report_from_json(text, Report)

    def save(self, path: str | Path) -> Path:
        """Writes the report by the path's suffix: .json, .html (one file that needs no other) or .png (by matplotlib).

        Raises:
            EquivalenceError: the suffix is another, the file cannot be written, or matplotlib is not installed.
        """
        return save_report(self, Path(path))
