"""The invariant of CONTRACT section 3 over a batch's two files, for every test that ends a batch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from service.core.accounting import Counts, check_batch_accounting, count_written
from service.core.batchfile import iter_lines


def check_output_files(batch: Mapping[str, Any], *, source: bytes, output: bytes, error: bytes) -> None:
    """`batch` is the object of a terminal batch that had its lines validated; the rest are the bytes of its input and
    of its two files (empty where it has none). Raises AssertionError or AccountingBroken.

    Output lines + error lines = total, every non-blank line of the input in one of them, each custom_id once, except on
    skipped lines, where it may be repeated or null.
    """
    counts, queue = batch["request_counts"], batch["queue"]
    expected = Counts(
        completed=counts["completed"], failed=counts["failed"], cancelled=queue["cancelled"], expired=queue["expired"]
    )
    for data, file_id in ((output, batch["output_file_id"]), (error, batch["error_file_id"])):
        assert bool(data) == (file_id is not None)
        assert data.isascii()
        assert not data or data.endswith(b"\n")
    written = count_written(output.splitlines(), error.splitlines())
    check_batch_accounting(total=counts["total"], counts=expected, written=written)
    lines = [json.loads(line) for line in (output + error).splitlines()]
    assert len({line["id"] for line in lines}) == len(lines), "an id twice"
    skipped = [line for line in lines if (line["error"] or {}).get("code") == "skipped_invalid_line"]
    assert len(skipped) == queue["skipped"]
    answered = Counter(line["custom_id"] for line in lines) - Counter(line["custom_id"] for line in skipped)
    assert not [name for name, n in answered.items() if n > 1], "a custom_id twice"
    assert None not in answered
    raw = [line.raw for line in iter_lines([source])]
    assert len(raw) == counts["total"], "blank lines are no lines"
    if not skipped:
        assert answered == Counter(json.loads(line or b"{}")["custom_id"] for line in raw)
