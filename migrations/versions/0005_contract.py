"""What the rest of the HTTP contract needs: quotas and webhooks of tenants, webhook events, streamed single jobs.

Revision ID: 0005
Revises: 0004
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_COLUMNS = (
    ("tenant", "max_queued_lines", sa.BigInteger),
    ("tenant", "max_queued_tokens", sa.BigInteger),
    ("tenant", "webhook_url", sa.Text),
    ("tenant", "webhook_secret", sa.LargeBinary),
    ("job", "stream_to", sa.Text),
    ("batch", "prompt_tokens", sa.BigInteger),
)


def upgrade() -> None:
    for table, name, kind in _COLUMNS:
        op.add_column(table, sa.Column(name, kind()))
    op.add_column(
        "batch_progress", sa.Column("measured_prompt_tokens", sa.BigInteger(), server_default="0", nullable=False)
    )
    op.execute("update batch_progress set measured_prompt_tokens = prompt_tokens")  # nobody counted them apart before
    op.create_table(
        "webhook_event",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.BigInteger(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("tries", sa.SmallInteger(), server_default="0", nullable=False),
        sa.Column("last_error", sa.Text()),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("delivered_at", sa.DateTime(timezone=True)),
        sa.Column("given_up_at", sa.DateTime(timezone=True)),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenant.id"], name="fk_webhook_event_tenant_id_tenant"),
        sa.PrimaryKeyConstraint("id", name="pk_webhook_event"),
    )
    op.create_index("ix_webhook_event_tenant_id_id", "webhook_event", ["tenant_id", "id"])


def downgrade() -> None:
    op.drop_table("webhook_event")
    op.drop_column("batch_progress", "measured_prompt_tokens")
    for table, name, _ in reversed(_COLUMNS):
        op.drop_column(table, name)
