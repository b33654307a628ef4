"""The real model for the engine tests: prepared once and kept in the checkout's .trunkline folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.models import prepare

FOLDER = Path(__file__).resolve().parents[2] / ".trunkline" / "test-model"


@pytest.fixture(scope="session")
def model_folder() -> Path:
    prepare(FOLDER)
    return FOLDER
