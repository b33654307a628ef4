"""What is wrong with a boot whose tokens or cache are not what the plan thinks; and results by when they came."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("instance_boot", sa.Column("alarm", sa.Text()))
    op.create_index(
        "ix_job_result_recorded_xid",
        "job_result",
        ["recorded_xid"],
        postgresql_using="brin",
        postgresql_with={"autosummarize": "on"},
    )


def downgrade() -> None:
    op.drop_index("ix_job_result_recorded_xid", table_name="job_result")
    op.drop_column("instance_boot", "alarm")
