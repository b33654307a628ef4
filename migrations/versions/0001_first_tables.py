"""The first tables: DESIGN.md section 3."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    _create_batch_progress()
    _create_cohort()
    _create_cohort_event()
    _create_control_task()
    _create_idempotency_key()
    _create_instance_boot()
    _create_job_result()
    _create_tenant()
    _create_api_key()
    _create_batch()
    _create_file()
    _create_job()
    _create_line_error()


def downgrade() -> None:
    op.drop_table("line_error")
    op.drop_table("job")
    op.drop_table("file")
    op.drop_table("batch")
    op.drop_table("api_key")
    op.drop_table("tenant")
    op.drop_table("job_result")
    op.drop_table("instance_boot")
    op.drop_table("idempotency_key")
    op.drop_table("control_task")
    op.drop_table("cohort_event")
    op.drop_table("cohort")
    op.drop_table("batch_progress")


def _create_batch_progress() -> None:
    op.create_table(
        "batch_progress",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("batch_id", sa.Text(), nullable=False),
        sa.Column("completed", sa.Integer(), server_default="0", nullable=False),
        sa.Column("failed", sa.Integer(), server_default="0", nullable=False),
        sa.Column("skipped", sa.Integer(), server_default="0", nullable=False),
        sa.Column("cancelled", sa.Integer(), server_default="0", nullable=False),
        sa.Column("expired", sa.Integer(), server_default="0", nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("predicted_cached_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("reasoning_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("lines_unknown", sa.Integer(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_batch_progress")),
    )
    op.create_index("ix_batch_progress_batch_id", "batch_progress", ["batch_id"])


def _create_cohort() -> None:
    op.create_table(
        "cohort",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("n_jobs", sa.Integer(), nullable=False),
        sa.Column("body_bytes", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("estimated_seconds", sa.Double(), server_default="0", nullable=False),
        sa.Column("priority", sa.SmallInteger(), nullable=False),
        sa.Column("alone", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("moved", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), server_default="0", nullable=False),
        sa.Column("failures", sa.SmallInteger(), server_default="0", nullable=False),
        sa.Column("dispatch_no", sa.Integer(), server_default="0", nullable=False),
        sa.Column("resends", sa.SmallInteger(), server_default="0", nullable=False),
        sa.Column("instance_boot_id", sa.BigInteger()),
        sa.Column("last_error", sa.Text()),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("dispatched_at", sa.DateTime(timezone=True)),
        sa.Column("started_at", sa.DateTime(timezone=True)),
        sa.Column("lease_expires_at", sa.DateTime(timezone=True)),
        sa.Column("finished_at", sa.DateTime(timezone=True)),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_cohort")),
        postgresql_with={
            "fillfactor": "70",
            "autovacuum_vacuum_scale_factor": "0.02",
            "autovacuum_vacuum_threshold": "500",
            "autovacuum_analyze_scale_factor": "0.05",
        },
    )
    op.create_index(
        "ix_cohort_active",
        "cohort",
        ["queue", "state", "priority", "sequence"],
        postgresql_where=sa.text("state in ('ready', 'dispatched', 'running')"),
    )
    op.create_index("ix_cohort_instance_boot_id_sequence", "cohort", ["instance_boot_id", "sequence"])
    op.create_index("ix_cohort_sequence", "cohort", ["sequence"])


def _create_cohort_event() -> None:
    op.create_table(
        "cohort_event",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("cohort_id", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("instance_boot_id", sa.BigInteger()),
        sa.Column("detail", sa.Text()),
        sa.Column("at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_cohort_event")),
    )
    op.create_index("ix_cohort_event_cohort_id", "cohort_event", ["cohort_id"])


def _create_control_task() -> None:
    op.create_table(
        "control_task",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), server_default="0", nullable=False),
        sa.Column("failures", sa.SmallInteger(), server_default="0", nullable=False),
        sa.Column("last_error", sa.Text()),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("not_before", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("published_at", sa.DateTime(timezone=True)),
        sa.Column("lease_expires_at", sa.DateTime(timezone=True)),
        sa.Column("finished_at", sa.DateTime(timezone=True)),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_control_task")),
    )
    op.create_index(
        "ix_control_task_open",
        "control_task",
        ["state", "id"],
        postgresql_where=sa.text("state in ('ready', 'running')"),
    )
    op.create_index(
        "uq_control_task_open",
        "control_task",
        ["kind", "subject"],
        unique=True,
        postgresql_where=sa.text("state in ('ready', 'running')"),
    )


def _create_idempotency_key() -> None:
    op.create_table(
        "idempotency_key",
        sa.Column("tenant_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("body_sha256", sa.LargeBinary(), nullable=False),
        sa.Column("created_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "key", name=op.f("pk_idempotency_key")),
    )


def _create_instance_boot() -> None:
    op.create_table(
        "instance_boot",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("pid_started_at", sa.Double(), nullable=False),
        sa.Column("devices", JSONB(), server_default=sa.text("'[]'"), nullable=False),
        sa.Column("engine", sa.Text(), nullable=False),
        sa.Column("engine_version", sa.Text()),
        sa.Column("engine_arguments", JSONB(), server_default=sa.text("'[]'"), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("adapters", JSONB(), server_default=sa.text("'[]'"), nullable=False),
        sa.Column("kv_capacity_tokens", sa.BigInteger()),
        sa.Column("block_size", sa.Integer()),
        sa.Column("max_num_seqs", sa.Integer()),
        sa.Column("max_model_len", sa.Integer()),
        sa.Column("honours_salt", sa.Boolean()),
        sa.Column("honours_priority", sa.Boolean()),
        sa.Column("reports_cached_tokens", sa.Boolean()),
        sa.Column("key_agrees", sa.Boolean()),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("running_jobs", sa.Integer(), server_default="0", nullable=False),
        sa.Column("waiting_jobs", sa.Integer(), server_default="0", nullable=False),
        sa.Column("prefill_tokens_per_second", sa.Double()),
        sa.Column("decode_tokens_per_second", sa.Double()),
        sa.Column("started_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("ready_at", sa.DateTime(timezone=True)),
        sa.Column("heartbeat_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("gone_at", sa.DateTime(timezone=True)),
        sa.Column("gone_reason", sa.Text()),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_instance_boot")),
    )
    op.create_index("ix_instance_boot_name", "instance_boot", ["name", "id"])
    op.create_index(
        "uq_instance_boot_queue", "instance_boot", ["queue"], unique=True, postgresql_where=sa.text("state <> 'gone'")
    )


def _create_job_result() -> None:
    op.create_table(
        "job_result",
        sa.Column("job_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("batch_id", sa.Text()),
        sa.Column("cohort_id", sa.BigInteger()),
        sa.Column("attempt", sa.Integer()),
        sa.Column("instance_boot_id", sa.BigInteger()),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("status_code", sa.SmallInteger()),
        sa.Column("error_code", sa.Text()),
        sa.Column("error_message", sa.Text()),
        sa.Column("response", sa.LargeBinary()),
        sa.Column("prompt_tokens", sa.Integer()),
        sa.Column("cached_tokens", sa.Integer()),
        sa.Column("predicted_cached_tokens", sa.Integer()),
        sa.Column("completion_tokens", sa.Integer()),
        sa.Column("reasoning_tokens", sa.Integer()),
        sa.Column("miss_cause", sa.Text()),
        sa.Column("queue_ms", sa.Integer()),
        sa.Column("run_ms", sa.Integer()),
        sa.Column("started_at", sa.DateTime(timezone=True)),
        sa.Column("finished_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column(
            "recorded_xid",
            sa.BigInteger(),
            server_default=sa.text("((pg_current_xact_id())::text)::bigint"),
            nullable=False,
        ),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_job_result")),
    )
    op.create_index(
        "ix_job_result_batch_id", "job_result", ["batch_id", "job_id"], postgresql_where=sa.text("batch_id is not null")
    )
    op.create_index("ix_job_result_instance_boot_id", "job_result", ["instance_boot_id"])
    op.create_index(
        "ix_job_result_recorded",
        "job_result",
        ["batch_id", "recorded_xid", "job_id"],
        postgresql_where=sa.text("batch_id is not null"),
    )


def _create_tenant() -> None:
    op.create_table(
        "tenant",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("salt", sa.LargeBinary(), nullable=False),
        sa.Column("weight", sa.Integer(), server_default="1", nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenant")),
        sa.UniqueConstraint("name", name=op.f("uq_tenant_name")),
    )


def _create_api_key() -> None:
    op.create_table(
        "api_key",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("tenant_id", sa.BigInteger(), nullable=False),
        sa.Column("label", sa.Text(), nullable=False),
        sa.Column("hash", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("revoked_at", sa.DateTime(timezone=True)),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenant.id"], name=op.f("fk_api_key_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_key")),
        sa.UniqueConstraint("hash", name=op.f("uq_api_key_hash")),
    )


def _create_batch() -> None:
    op.create_table(
        "batch",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.BigInteger(), nullable=False),
        sa.Column("endpoint", sa.Text(), nullable=False),
        sa.Column("input_file_id", sa.Text(), nullable=False),
        sa.Column("completion_window", sa.Text(), nullable=False),
        sa.Column("model", sa.Text()),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("metadata", JSONB()),
        sa.Column("errors", JSONB()),
        sa.Column("priority", sa.SmallInteger(), server_default="1", nullable=False),
        sa.Column("on_invalid_line", sa.Text(), server_default="fail", nullable=False),
        sa.Column("line_order", sa.Text(), server_default="any", nullable=False),
        sa.Column("model_policy", sa.Text(), server_default="mixed", nullable=False),
        sa.Column("paused", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("retry_of", sa.Text()),
        sa.Column("output_expires_after_seconds", sa.Integer()),
        sa.Column("total", sa.Integer(), server_default="0", nullable=False),
        sa.Column("prefix_groups", sa.Integer()),
        sa.Column("bound_tokens", sa.BigInteger()),
        sa.Column("intake_offset", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("intake_line", sa.Integer(), server_default="0", nullable=False),
        sa.Column("intake_done", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("output_file_id", sa.Text()),
        sa.Column("error_file_id", sa.Text()),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("in_progress_at", sa.DateTime(timezone=True)),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finalizing_at", sa.DateTime(timezone=True)),
        sa.Column("completed_at", sa.DateTime(timezone=True)),
        sa.Column("failed_at", sa.DateTime(timezone=True)),
        sa.Column("expired_at", sa.DateTime(timezone=True)),
        sa.Column("cancelling_at", sa.DateTime(timezone=True)),
        sa.Column("cancelled_at", sa.DateTime(timezone=True)),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenant.id"], name=op.f("fk_batch_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_batch")),
    )
    op.create_index(
        "ix_batch_open",
        "batch",
        ["status", "expires_at"],
        postgresql_where=sa.text("status in ('validating', 'in_progress', 'finalizing', 'cancelling')"),
    )
    op.create_index("ix_batch_tenant_id_id", "batch", ["tenant_id", "id"])


def _create_file() -> None:
    op.create_table(
        "file",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.BigInteger(), nullable=False),
        sa.Column("filename", sa.Text(), nullable=False),
        sa.Column("purpose", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.LargeBinary(), nullable=False),
        sa.Column("store_path", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True)),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenant.id"], name=op.f("fk_file_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_file")),
    )
    op.create_index("ix_file_tenant_id_id", "file", ["tenant_id", "id"])


def _create_job() -> None:
    op.create_table(
        "job",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("public_id", sa.Text()),
        sa.Column("tenant_id", sa.BigInteger(), nullable=False),
        sa.Column("batch_id", sa.Text()),
        sa.Column("line_no", sa.Integer()),
        sa.Column("custom_id", sa.Text()),
        sa.Column("endpoint", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("prefix_key", sa.LargeBinary(), nullable=False),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("predicted_output_tokens", sa.Integer(), nullable=False),
        sa.Column("predicted_cached_tokens", sa.Integer()),
        sa.Column("first_of_group", sa.Boolean()),
        sa.Column("cohort_id", sa.BigInteger()),
        sa.Column("cohort_position", sa.Integer()),
        sa.Column("priority", sa.SmallInteger()),
        sa.Column("deadline_at", sa.DateTime(timezone=True)),
        sa.Column("metadata", JSONB()),
        sa.Column("webhook_url", sa.Text()),
        sa.Column("not_before", sa.DateTime(timezone=True)),
        sa.Column("tries", sa.SmallInteger(), server_default="0", nullable=False),
        sa.Column("crashes", sa.SmallInteger(), server_default="0", nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("cancel_requested_at", sa.DateTime(timezone=True)),
        sa.ForeignKeyConstraint(["batch_id"], ["batch.id"], name=op.f("fk_job_batch_id")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenant.id"], name=op.f("fk_job_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_job")),
        sa.UniqueConstraint("batch_id", "line_no", name=op.f("uq_job_batch_id_line_no")),
    )
    op.create_index("ix_job_cohort_id", "job", ["cohort_id"], postgresql_where=sa.text("cohort_id is not null"))
    op.create_index(
        "ix_job_retrying", "job", ["batch_id"], postgresql_where=sa.text("not_before is not null and cohort_id is null")
    )
    op.create_index(
        "ix_job_unplanned_batch",
        "job",
        ["batch_id", "model", "id"],
        postgresql_where=sa.text("cohort_id is null and batch_id is not null"),
    )
    op.create_index(
        "ix_job_unplanned_single",
        "job",
        ["model", "priority", "id"],
        postgresql_where=sa.text("cohort_id is null and batch_id is null"),
    )
    op.create_index(
        "ix_job_tenant_id_public_id",
        "job",
        ["tenant_id", "public_id"],
        postgresql_where=sa.text("public_id is not null"),
    )
    op.create_index("ix_job_unplanned", "job", ["model", "id"], postgresql_where=sa.text("cohort_id is null"))
    op.create_index(
        "uq_job_public_id", "job", ["public_id"], unique=True, postgresql_where=sa.text("public_id is not null")
    )


def _create_line_error() -> None:
    op.create_table(
        "line_error",
        sa.Column("batch_id", sa.Text(), nullable=False),
        sa.Column("line_no", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("custom_id", sa.Text()),
        sa.Column("code", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("param", sa.Text()),
        sa.Column(
            "recorded_xid",
            sa.BigInteger(),
            server_default=sa.text("((pg_current_xact_id())::text)::bigint"),
            nullable=False,
        ),
        sa.ForeignKeyConstraint(["batch_id"], ["batch.id"], name=op.f("fk_line_error_batch_id")),
        sa.PrimaryKeyConstraint("batch_id", "line_no", name=op.f("pk_line_error")),
    )
