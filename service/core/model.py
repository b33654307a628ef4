"""The words every part shares: statuses, outcomes and causes, each member with who moves it and where to."""

from __future__ import annotations

from enum import IntEnum, StrEnum


class Endpoint(StrEnum):
    """What a job asks of the engine: the path is sent to it as it is."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    EMBEDDINGS = "/v1/embeddings"


class Priority(IntEnum):
    """Class of a job; a higher class is planned and admitted first. The number is what the tables hold."""

    LOW = 0
    NORMAL = 1
    HIGH = 2
    INTERACTIVE = 3  # single jobs; never given to a batch

    @property
    def label(self) -> str:
        return self.name.lower()


class BatchStatus(StrEnum):
    """OpenAI's statuses. Each arrow is one conditional UPDATE in `service.store.batches`."""

    VALIDATING = "validating"  # api creates it; intake moves it on
    IN_PROGRESS = "in_progress"  # intake, after pass 1
    FINALIZING = "finalizing"  # the reaper, when every line has its result
    COMPLETED = "completed"  # export, when both files are published
    FAILED = "failed"  # intake (bad input) or export (files cannot be written)
    EXPIRED = "expired"  # control, after expires_at, when both files are published
    CANCELLING = "cancelling"  # api, at the user's request
    CANCELLED = "cancelled"  # control, when both files are published

    @property
    def is_terminal(self) -> bool:
        return self in TERMINAL_BATCH_STATUSES


TERMINAL_BATCH_STATUSES = frozenset(
    {BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.EXPIRED, BatchStatus.CANCELLED}
)


class JobStatus(StrEnum):
    """What `GET /v1/jobs/{id}` says; derived from the rows, stored nowhere."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class Outcome(StrEnum):
    """How a job ended; one result row each, written once (the primary key sees to it)."""

    SUCCEEDED = "succeeded"  # worker: the engine answered 2xx
    FAILED = "failed"  # worker: the engine refused it, or every try failed
    CANCELLED = "cancelled"  # control or worker, after a cancel
    EXPIRED = "expired"  # control or worker, after the deadline


class CohortState(StrEnum):
    """Life of a cohort; DESIGN.md section 3 has the guards."""

    READY = "ready"  # dispatcher (new), worker (drain), reaper (lease expired)
    DISPATCHED = "dispatched"  # dispatcher: committed, then published
    RUNNING = "running"  # worker: claimed under a new attempt number
    DONE = "done"  # worker: no job still bound here lacks a result
    DEAD = "dead"  # dispatcher: two failures; its jobs run on as single-job cohorts


class BootState(StrEnum):
    """One life of an instance; a row is never reused."""

    STARTING = "starting"  # worker: its engine loads
    READY = "ready"  # worker: probed, takes cohorts
    DRAINING = "draining"  # worker: told to stop; finishes what it has
    GONE = "gone"  # worker on leaving, its successor, or the reaper on a stale heartbeat


class TaskKind(StrEnum):
    """Control work. `subject` is a batch id, of WEBHOOK the id of an event."""

    INTAKE = "intake"  # validate, tokenise, COPY the job rows
    EXPORT = "export"  # write both files, end the batch
    CANCEL = "cancel"  # end the lines that do not run, then what remains, then export
    EXPIRE = "expire"  # the same at the deadline
    DELETE = "delete"  # remove the rows of a batch that its producer deleted, in chunks, the batch's own last
    WEBHOOK = "webhook"  # tell a tenant's server that a batch or a job has ended


class TaskState(StrEnum):
    READY = "ready"  # whoever creates it; the control worker after an error, or to come back later
    RUNNING = "running"  # a control worker, under a lease; an expired one may be claimed again
    DONE = "done"  # the control worker
    DEAD = "dead"  # the control worker, after 8 failures; its batch is failed, its webhook given up


class MissCause(StrEnum):
    """Why fewer tokens came from the cache than the prompt could share."""

    FIRST_OF_GROUP = "first_of_group"  # somebody has to compute it once
    EVICTED = "evicted"  # it was there, and the cache ran out of room
    OTHER_INSTANCE = "other_instance"  # its neighbours ran elsewhere (a cut or a steal)
    IN_FLIGHT = "in_flight"  # its neighbour was at the engine at the same time, not computed yet
    RESTARTED = "restarted"  # a new boot, an empty cache
    SALT = "salt"  # the engine keeps tenants apart, the plan did not know
    BELOW_ONE_BLOCK = "below_one_block"  # shared less than one block
    CACHE_BYPASSED = "cache_bypassed"  # prompt_logprobs and the like read no cache
    KEY_MISMATCH = "key_mismatch"  # our tokens are not the engine's
    UNKNOWN = "unknown"


class LineErrorCode(StrEnum):
    """Result-line errors of lines that the engine never answered."""

    BATCH_EXPIRED = "batch_expired"
    BATCH_CANCELLED = "batch_cancelled"
    REQUEST_TIMEOUT = "request_timeout"
    ENGINE_CRASH = "engine_crash"
    WORKER_LOST = "worker_lost"
    SKIPPED_INVALID_LINE = "skipped_invalid_line"


class PolicyName(StrEnum):
    """Who says what an instance runs next; `core/policies.py` makes one. All but the first are there to compare."""

    PREFIX = "prefix"  # the planner: the backlog in prefix order
    ROUND_ROBIN = "round_robin"
    LEAST_LOADED = "least_loaded"
    AFFINITY = "affinity"  # an online router: the longest match among instances that are not overloaded
    CACHE_AWARE = "cache_aware"  # SGLang's router
    PREFIX_HASH = "prefix_hash"  # consistent hashing of the prompt's beginning, with bounded loads
    LEDGER = "ledger"  # how single jobs are placed
    SHARED_QUEUE = "shared_queue"  # one queue in key order for all instances
