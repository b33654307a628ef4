"""The tables of work and results, once; `control_tables` has the rest. Time columns are written with the database
clock; DESIGN.md section 3 says who writes which."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Double,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)


def id_column() -> Column[int]:
    return Column("id", BigInteger, Identity(always=True), primary_key=True)


def at(name: str, *, default_now: bool = False) -> Column[object]:
    if default_now:
        return Column(name, DateTime(timezone=True), nullable=False, server_default=func.now())
    return Column(name, DateTime(timezone=True))


def _recorded_xid() -> Column[int]:
    """The transaction that wrote the row, as a number that only grows (64 bits, it does not wrap).

    Rows below the oldest transaction still running are all there: a cursor over (recorded_xid, id) below that limit
    loses no row, in whatever order transactions commit. A sequence or a time cannot promise that.
    """
    default = text("((pg_current_xact_id())::text)::bigint")
    return Column("recorded_xid", BigInteger, nullable=False, server_default=default)


tenant = Table(
    "tenant",
    metadata,
    id_column(),
    Column("name", Text, nullable=False, unique=True),
    Column("salt", LargeBinary, nullable=False),  # secret; keeps tenants apart in every engine's cache
    Column("weight", Integer, nullable=False, server_default="1"),
    Column("max_queued_lines", BigInteger),  # its quotas; null: as the settings say
    Column("max_queued_tokens", BigInteger),
    Column("webhook_url", Text),  # told when a batch ends; null: nobody is
    Column("webhook_secret", LargeBinary),  # signs every webhook of the tenant; made with the first
    at("created_at", default_now=True),
)

api_key = Table(
    "api_key",
    metadata,
    id_column(),
    Column("tenant_id", ForeignKey("tenant.id"), nullable=False),
    Column("label", Text, nullable=False),  # what `trunkline keys list` shows; never part of the key
    Column("hash", LargeBinary, nullable=False, unique=True),  # SHA-256 of the key; the key itself is nowhere
    at("created_at", default_now=True),
    at("revoked_at"),
)

file = Table(
    "file",
    metadata,
    Column("id", Text, primary_key=True),  # "file-" + time-sortable hex
    Column("tenant_id", ForeignKey("tenant.id"), nullable=False),
    Column("filename", Text, nullable=False),  # shown, never used as a path
    Column("purpose", Text, nullable=False),  # batch, batch_output
    Column("bytes", BigInteger, nullable=False),
    Column("sha256", LargeBinary, nullable=False),
    Column("store_path", Text, nullable=False),  # below STORE_URL
    at("created_at", default_now=True),
    at("expires_at"),
    Index("ix_file_tenant_id_id", "tenant_id", "id"),  # ids sort by time: this is (created_at, id)
)

batch = Table(
    "batch",
    metadata,
    Column("id", Text, primary_key=True),  # "batch_" + time-sortable hex
    Column("tenant_id", ForeignKey("tenant.id"), nullable=False),
    Column("endpoint", Text, nullable=False),
    Column("input_file_id", Text, nullable=False),
    Column("completion_window", Text, nullable=False),
    Column("model", Text),  # null while unknown and when mixed
    Column("status", Text, nullable=False),
    Column("metadata", JSONB),
    Column("errors", JSONB),  # list of {code, line, message, param}, at most 101
    Column("priority", SmallInteger, nullable=False, server_default="1"),
    Column("on_invalid_line", Text, nullable=False, server_default="fail"),  # fail, skip
    Column("line_order", Text, nullable=False, server_default="any"),  # any, input
    Column("model_policy", Text, nullable=False, server_default="mixed"),  # mixed, strict
    Column("paused", Boolean, nullable=False, server_default=text("false")),
    Column("retry_of", Text),
    Column("output_expires_after_seconds", Integer),
    Column("total", Integer, nullable=False, server_default="0"),  # non-blank lines; 0 until in_progress
    Column("prompt_tokens", BigInteger),  # of its lines: estimated when it begins, counted at the end of intake
    Column("prefix_groups", Integer),  # set at the end of intake
    Column("bound_tokens", BigInteger),  # set at the end of intake, at the fleet's block size
    # Pass 2 goes on from here after a restart: the byte and the physical line after the last committed chunk.
    Column("intake_offset", BigInteger, nullable=False, server_default="0"),
    Column("intake_line", Integer, nullable=False, server_default="0"),
    Column("intake_done", Boolean, nullable=False, server_default=text("false")),
    Column("output_file_id", Text),
    Column("error_file_id", Text),
    at("created_at", default_now=True),
    at("in_progress_at"),
    Column("expires_at", DateTime(timezone=True), nullable=False),
    at("finalizing_at"),
    at("completed_at"),
    at("failed_at"),
    at("expired_at"),
    at("cancelling_at"),
    at("cancelled_at"),
    Index("ix_batch_tenant_id_id", "tenant_id", "id"),  # ids sort by time: this is (created_at, id)
    Index(
        "ix_batch_open",
        "status",
        "expires_at",
        postgresql_where=text("status in ('validating', 'in_progress', 'finalizing', 'cancelling')"),
    ),
)

_RETRYING = text("not_before is not null and cohort_id is null")

job = Table(
    "job",
    metadata,
    id_column(),
    Column("public_id", Text),  # "job_..." of single jobs; lines of a batch are named from `id`
    Column("tenant_id", ForeignKey("tenant.id"), nullable=False),
    Column("batch_id", ForeignKey("batch.id")),  # null for single jobs
    Column("line_no", Integer),  # 1-based physical line; identity of a line is (batch_id, line_no)
    Column("custom_id", Text),
    Column("endpoint", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),  # immutable JSON bytes, as they go to the engine
    Column("prefix_key", LargeBinary, nullable=False),
    Column("prompt_tokens", Integer, nullable=False),
    Column("predicted_output_tokens", Integer, nullable=False),
    Column("predicted_cached_tokens", Integer),  # the planner's, written with cohort_id
    Column("first_of_group", Boolean),  # the planner's: no neighbour before it in the run to share with
    Column("cohort_id", BigInteger),
    Column("cohort_position", Integer),  # planned order within the cohort
    Column("priority", SmallInteger),  # single jobs only; a batch's jobs take the batch's
    Column("deadline_at", DateTime(timezone=True)),  # single jobs only
    Column("metadata", JSONB),  # single jobs only
    Column("webhook_url", Text),  # single jobs only
    Column("stream_to", Text),  # single jobs only: the queue of the API process that relays the answer's chunks
    at("not_before"),  # set on a retry
    Column("tries", SmallInteger, nullable=False, server_default="0"),  # engine answers that were retried
    Column("crashes", SmallInteger, nullable=False, server_default="0"),  # engine deaths while in flight
    at("created_at", default_now=True),
    at("cancel_requested_at"),  # single jobs only
    Index("uq_job_public_id", "public_id", unique=True, postgresql_where=text("public_id is not null")),
    Index("ix_job_tenant_id_public_id", "tenant_id", "public_id", postgresql_where=text("public_id is not null")),
    Index("ix_job_retrying", "batch_id", postgresql_where=_RETRYING),
    Index("ix_job_retry_due", "not_before", "id", postgresql_where=_RETRYING),
    UniqueConstraint("batch_id", "line_no"),
    Index("ix_job_unplanned", "model", "id", postgresql_where=text("cohort_id is null")),
    Index(
        "ix_job_unplanned_batch",
        "batch_id",
        "model",
        "id",
        postgresql_where=text("cohort_id is null and batch_id is not null"),
    ),
    Index(
        "ix_job_unplanned_single",
        "model",
        "priority",
        "id",
        postgresql_where=text("cohort_id is null and batch_id is null"),
    ),
    Index("ix_job_cohort_id", "cohort_id", postgresql_where=text("cohort_id is not null")),
)

cohort = Table(
    "cohort",
    metadata,
    id_column(),
    Column("model", Text, nullable=False),
    Column("queue", Text, nullable=False),  # the instance it is planned for; a steal changes it
    Column("sequence", BigInteger, nullable=False),  # order within the queue and class: the planned order
    Column("n_jobs", Integer, nullable=False),
    Column("body_bytes", BigInteger, nullable=False, server_default="0"),
    Column("estimated_seconds", Double, nullable=False, server_default="0"),
    Column("priority", SmallInteger, nullable=False),
    Column("alone", Boolean, nullable=False, server_default=text("false")),  # poison suspects run beside nothing
    Column("moved", Boolean, nullable=False, server_default=text("false")),  # stolen or re-queued since it was planned
    Column("state", Text, nullable=False),
    Column("attempt", Integer, nullable=False, server_default="0"),  # the fencing number, only grows
    Column("failures", SmallInteger, nullable=False, server_default="0"),
    Column("dispatch_no", Integer, nullable=False, server_default="0"),
    Column("resends", SmallInteger, nullable=False, server_default="0"),  # of the present dispatch's message
    Column("instance_boot_id", BigInteger),
    Column("last_error", Text),
    at("created_at", default_now=True),
    at("dispatched_at"),
    at("started_at"),
    at("lease_expires_at"),
    at("finished_at"),
    Index(
        "ix_cohort_active",
        "queue",
        "state",
        "priority",
        "sequence",
        postgresql_where=text("state in ('ready', 'dispatched', 'running')"),
    ),
    Index("ix_cohort_instance_boot_id_sequence", "instance_boot_id", "sequence"),
    Index("ix_cohort_sequence", "sequence"),
    postgresql_with={
        "fillfactor": "70",
        "autovacuum_vacuum_scale_factor": "0.02",
        "autovacuum_vacuum_threshold": "500",
        "autovacuum_analyze_scale_factor": "0.05",
    },
)

instance_boot = Table(
    "instance_boot",
    metadata,
    id_column(),
    Column("name", Text, nullable=False),
    Column("queue", Text, nullable=False),
    Column("host", Text, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("pid_started_at", Double, nullable=False),  # Unix seconds; tells a reused pid from the same process
    Column("devices", JSONB, nullable=False, server_default=text("'[]'")),
    Column("engine", Text, nullable=False),  # vllm, openai, simulated
    Column("engine_version", Text),
    Column("engine_arguments", JSONB, nullable=False, server_default=text("'[]'")),
    Column("model", Text, nullable=False),
    Column("adapters", JSONB, nullable=False, server_default=text("'[]'")),
    Column("kv_capacity_tokens", BigInteger),
    Column("block_size", Integer),
    Column("max_num_seqs", Integer),
    Column("max_model_len", Integer),
    Column("honours_salt", Boolean),
    Column("honours_priority", Boolean),
    Column("reports_cached_tokens", Boolean),
    Column("key_agrees", Boolean),  # our token ids against the engine's /tokenize; false is `key mismatch`
    Column("alarm", Text),  # what is wrong where it is false: a member of core.alarm.Mismatch
    Column("state", Text, nullable=False),
    Column("running_jobs", Integer, nullable=False, server_default="0"),
    Column("waiting_jobs", Integer, nullable=False, server_default="0"),
    Column("prefill_tokens_per_second", Double),
    Column("decode_tokens_per_second", Double),
    at("started_at", default_now=True),
    at("ready_at"),
    Column("heartbeat_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    at("gone_at"),
    Column("gone_reason", Text),
    Index("uq_instance_boot_queue", "queue", unique=True, postgresql_where=text("state <> 'gone'")),
    Index("ix_instance_boot_name", "name", "id"),
)

job_result = Table(
    "job_result",
    metadata,
    Column("job_id", BigInteger, primary_key=True, autoincrement=False),
    Column("batch_id", Text),  # the job's, so that export and polls need no join
    Column("cohort_id", BigInteger),
    Column("attempt", Integer),
    Column("instance_boot_id", BigInteger),
    Column("outcome", Text, nullable=False),
    Column("status_code", SmallInteger),  # null when the engine never answered
    Column("error_code", Text),  # LineErrorCode when it never answered
    Column("error_message", Text),
    Column("response", LargeBinary),  # the engine's body, as it came
    Column("prompt_tokens", Integer),
    Column("cached_tokens", Integer),  # null = the engine did not say; never 0 for unknown
    Column("predicted_cached_tokens", Integer),
    Column("completion_tokens", Integer),
    Column("reasoning_tokens", Integer),
    Column("miss_cause", Text),
    Column("queue_ms", Integer),
    Column("run_ms", Integer),
    Column("started_at", DateTime(timezone=True)),
    at("finished_at", default_now=True),
    _recorded_xid(),
    Index("ix_job_result_batch_id", "batch_id", "job_id", postgresql_where=text("batch_id is not null")),
    Index(
        "ix_job_result_recorded", "batch_id", "recorded_xid", "job_id", postgresql_where=text("batch_id is not null")
    ),
    # Rows lie in about this order, so a summary of ranges is enough, and costs next to nothing on a write.
    Index(
        "ix_job_result_recorded_xid",
        "recorded_xid",
        postgresql_using="brin",
        postgresql_with={"autosummarize": "on"},
    ),
    Index("ix_job_result_boot_recorded", "instance_boot_id", "recorded_xid", "job_id"),
    Index(
        "ix_job_result_short",
        "instance_boot_id",
        "recorded_xid",
        "job_id",
        postgresql_where=text("cached_tokens < predicted_cached_tokens"),
    ),
)

line_error = Table(
    "line_error",
    metadata,
    Column("batch_id", ForeignKey("batch.id"), primary_key=True),
    Column("line_no", Integer, primary_key=True, autoincrement=False),
    Column("custom_id", Text),
    Column("code", Text, nullable=False),
    Column("message", Text, nullable=False),
    Column("param", Text),
    _recorded_xid(),
)

batch_progress = Table(
    "batch_progress",
    metadata,
    id_column(),
    Column("batch_id", Text, nullable=False),
    Column("completed", Integer, nullable=False, server_default="0"),
    Column("failed", Integer, nullable=False, server_default="0"),  # skipped lines too
    Column("skipped", Integer, nullable=False, server_default="0"),  # of `failed`
    Column("cancelled", Integer, nullable=False, server_default="0"),
    Column("expired", Integer, nullable=False, server_default="0"),
    Column("prompt_tokens", BigInteger, nullable=False, server_default="0"),
    Column("cached_tokens", BigInteger, nullable=False, server_default="0"),
    Column("predicted_cached_tokens", BigInteger, nullable=False, server_default="0"),
    Column("completion_tokens", BigInteger, nullable=False, server_default="0"),
    Column("reasoning_tokens", BigInteger, nullable=False, server_default="0"),
    # Of the lines whose answer says how many tokens came from cache: what `cached_tokens` is a share of.
    Column("measured_prompt_tokens", BigInteger, nullable=False, server_default="0"),
    Column("lines_unknown", Integer, nullable=False, server_default="0"),  # ended without a word on cached tokens
    Index("ix_batch_progress_batch_id", "batch_id"),
)

cohort_event = Table(
    "cohort_event",
    metadata,
    id_column(),
    Column("cohort_id", BigInteger, nullable=False),
    Column("attempt", Integer, nullable=False),
    # planned, dispatched, stolen, claimed, done, released, expired, crashed, split
    Column("kind", Text, nullable=False),
    Column("instance_boot_id", BigInteger),
    Column("detail", Text),
    at("at", default_now=True),
    Index("ix_cohort_event_cohort_id", "cohort_id"),
)
