"""Jobs to retry by their time: the dispatcher reads those whose time has come.

Revision ID: 0004
Revises: 0003
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    waiting = sa.text("not_before is not null and cohort_id is null")
    op.create_index("ix_job_retry_due", "job", ["not_before", "id"], postgresql_where=waiting)


def downgrade() -> None:
    op.drop_index("ix_job_retry_due", table_name="job")
