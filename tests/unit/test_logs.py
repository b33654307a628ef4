"""service.logs: what a traceback in a log shows."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import logging
from pathlib import Path
from service.logs import set_up_logging
from service.settings import Settings

set_up_logging(Settings(state_folder=Path("nowhere")))
try:
    try:
        {}["the prompt"]
    except KeyError as error:
        raise ValueError("cannot read 'the answer'") from error
except ValueError:
    logging.getLogger("a").exception("it failed: job=%d", 7)
"""


def test_an_exception_is_logged_without_its_message() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert "ERROR a: it failed: job=7" in done.stderr
    assert "Traceback" in done.stderr
    assert "ValueError" in done.stderr
    assert "KeyError" in done.stderr
    assert "the prompt" not in done.stderr
    assert "the answer" not in done.stderr
