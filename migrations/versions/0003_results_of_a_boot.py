"""The results of a boot in the order of recording, and of these the ones that fell short of the plan."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_ORDER = ["instance_boot_id", "recorded_xid", "job_id"]


def upgrade() -> None:
    op.create_index("ix_job_result_boot_recorded", "job_result", _ORDER)
    op.create_index(
        "ix_job_result_short",
        "job_result",
        _ORDER,
        postgresql_where=sa.text("cached_tokens < predicted_cached_tokens"),
    )
    op.drop_index("ix_job_result_instance_boot_id", "job_result")


def downgrade() -> None:
    op.create_index("ix_job_result_instance_boot_id", "job_result", ["instance_boot_id"])
    op.drop_index("ix_job_result_short", "job_result")
    op.drop_index("ix_job_result_boot_recorded", "job_result")
