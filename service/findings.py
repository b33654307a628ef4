"""What a first reading of a batch's input file finds: its errors as `errors.data` shows them, its lines and models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from service.core.batchfile import FileValidator, LineCode, LineError, ParsedLine, RawLine, error_entry

_MAX_SHOWN_ERRORS = 100
_FILE_CODES = (LineCode.TOO_MANY_TASKS, LineCode.EMPTY_BATCH)


@dataclass(slots=True)
class Findings:
    """Grows chunk by chunk; bounded whatever the file holds."""

    lines: int = 0
    refused: int = 0
    shown: list[LineError] = field(default_factory=list)  # the first that may be shown
    of_file: LineError | None = None  # fails the batch under any policy
    models: set[str] = field(default_factory=set)  # as the lines name them; two are enough to know

    def errors_shown(self, *, is_skipping: bool) -> list[dict[str, Any]]:
        """What fails the batch, as its `errors.data`: empty where it goes on."""
        if self.refused and not is_skipping:
            return self.all_errors()
        return [] if self.of_file is None else [error_entry(self.of_file)]

    def all_errors(self) -> list[dict[str, Any]]:
        """The first 100 in file order, then one `too_many_errors`."""
        shown = [error_entry(error) for error in self.shown]
        if self.refused > len(shown):
            message = f"The file has more errors; the first {len(shown)} are shown."
            shown.append({"code": "too_many_errors", "line": None, "message": message, "param": None})
        if not shown and self.of_file is not None:
            shown.append(error_entry(self.of_file))
        return shown


def check_lines(
    validator: FileValidator, chunk: Iterable[RawLine], findings: Findings
) -> Iterator[ParsedLine | LineError]:
    """The sound lines, and those that are refused by themselves. Ends at an error of the whole file, after which
    nothing more need be read."""
    for raw in chunk:
        checked = validator.check(raw)
        if isinstance(checked, ParsedLine):
            if len(findings.models) < 2:
                findings.models.add(checked.model)
            yield checked
            continue
        findings.refused += 1
        if len(findings.shown) < _MAX_SHOWN_ERRORS:
            findings.shown.append(checked)
        if checked.code in _FILE_CODES:
            findings.of_file = checked
            return
        yield checked
