"""Where the recorded traces are, for tests that measure on them; they are no part of the repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def trace_folder() -> Path:
    """TRUNKLINE_TEST_TRACES, or shared/traces beside the checkout. Skips the test where neither is there."""
    beside = Path(__file__).resolve().parents[3] / "shared" / "traces"
    folder = Path(os.environ.get("TRUNKLINE_TEST_TRACES") or beside)
    if not folder.is_dir():
        pytest.skip("no traces: set TRUNKLINE_TEST_TRACES")
    return folder
