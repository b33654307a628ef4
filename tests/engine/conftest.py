"""The real model for the engine tests: prepared once and kept, since its conversion takes most of a minute."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model_folder() -> Path:
    given = os.environ.get("TEST_MODEL_FOLDER")
    if given:
        return Path(given)
    pytest.skip("TEST_MODEL_FOLDER")
