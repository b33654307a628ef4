"""Which servers a session's tests run against."""

from __future__ import annotations

import os
from dataclasses import dataclass

import sqlalchemy as sa

EXTERNAL = (os.environ.get("TEST_DATABASE_URL"), os.environ.get("TEST_BROKER_URL"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """Where the session's servers are; `template` is a migrated, empty database."""

    kind: str  # embedded, external
    database_url: str  # of a database from which others are created
    broker_url: str
    template: str

    def url_of(self, name: str) -> str:
        return sa.make_url(self.database_url).set(database=name).render_as_string(hide_password=False)
