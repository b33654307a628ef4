"""Hypothesis for the unit tests: fewer examples, and no deadline, which a busy machine would miss."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("unit", max_examples=30, deadline=None)
settings.load_profile("unit")
