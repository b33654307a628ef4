"""What the tests of control work share: a tenant, an uploaded file, a batch, and the work to run its tasks with."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa

from service.control import run_task
from service.core.model import Endpoint, LineErrorCode, Outcome, TaskKind
from service.fleet import Model, Models
from service.settings import Settings
from service.store import batches, control, files, results, tenants
from service.store.batches import Batch, NewBatch
from service.store.blobs import Blobs, new_blob_path
from service.store.control_tables import control_task
from service.store.session import Database
from service.store.tables import job, job_result
from service.tokenizing import Tokenizing
from service.work import Work

MODELS = Models(
    {
        "tiny": Model(name="tiny", aliases=("small",), adapters=("tiny-legal",)),
        "other": Model(name="other"),
    }
)


def request(custom_id: str, *, model: str = "tiny", text: str = "hello", **fields: Any) -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 5}
    return {"custom_id": custom_id, "method": "POST", "url": Endpoint.CHAT.value, "body": body, **fields}


def jsonl(rows: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """A tenant at work: upload, create, run the tasks, look."""

    work: Work
    tenant_id: int

    @property
    def database(self) -> Database:
        return self.work.database

    def with_settings(self, **changes: Any) -> Desk:
        return replace(self, work=replace(self.work, settings=replace(self.work.settings, **changes)))

    def upload(self, data: bytes) -> str:
        with self.work.blobs.writer(new_blob_path("input")) as writer:
            writer.write(data)
            blob = writer.publish()
        with self.database.transaction() as conn:
            return files.create_file(
                conn, tenant_id=self.tenant_id, filename="in.jsonl", purpose=files.Purpose.BATCH, blob=blob
            ).id

    def create(self, data: bytes, **fields: Any) -> tuple[str, int]:
        """The batch and its intake task."""
        new = NewBatch(
            endpoint=Endpoint.CHAT.value,
            input_file_id=self.upload(data),
            completion_window="24h",
            window_seconds=86_400,
        )
        with self.database.transaction() as conn:
            batch = batches.create_batch(conn, self.tenant_id, replace(new, **fields))
            return batch.id, control.create_task(conn, TaskKind.INTAKE, batch.id)

    def take_in(self, data: bytes, **fields: Any) -> str:
        """A batch whose intake has run."""
        batch_id, task_id = self.create(data, **fields)
        run_task(self.work, task_id)
        return batch_id

    def batch(self, batch_id: str) -> Batch:
        with self.database.transaction() as conn:
            found = batches.load_batch(conn, batch_id)
        assert found is not None
        return found

    def progress(self, batch_id: str) -> batches.Progress:
        with self.database.transaction() as conn:
            return batches.progress(conn, batch_id)

    def jobs(self, batch_id: str) -> list[sa.Row[Any]]:
        with self.database.transaction() as conn:
            return list(conn.execute(sa.select(job).where(job.c.batch_id == batch_id).order_by(job.c.line_no)))

    def task(self, task_id: int) -> sa.Row[Any]:
        with self.database.transaction() as conn:
            return conn.execute(sa.select(control_task).where(control_task.c.id == task_id)).one()

    def start(self, kind: TaskKind, batch_id: str) -> int:
        with self.database.transaction() as conn:
            return control.create_task(conn, kind, batch_id)

    def finalize(self) -> list[int]:
        with self.database.transaction() as conn:
            return control.due_finalizing(conn)

    def cancel(self, batch_id: str) -> int:
        with self.database.transaction() as conn:
            assert batches.request_cancel(conn, batch_id)
            return control.create_task(conn, TaskKind.CANCEL, batch_id)

    def make_due(self, task_id: int) -> None:
        """As if the time of its next try had come."""
        with self.database.transaction() as conn:
            conn.execute(sa.update(control_task).where(control_task.c.id == task_id).values(not_before=sa.func.now()))

    def expire_lease(self, task_id: int) -> None:
        """As if its worker had been killed a lease ago."""
        with self.database.transaction() as conn:
            passed = sa.func.now() - sa.func.make_interval(0, 0, 0, 0, 0, 0, 1)
            conn.execute(sa.update(control_task).where(control_task.c.id == task_id).values(lease_expires_at=passed))

    def answer(self, batch_id: str, custom_ids: Iterable[str], *, status_code: int = 200) -> None:
        """Result rows as a worker would have written them."""
        chosen = {row.custom_id: row.id for row in self.jobs(batch_id)}
        rows: list[dict[str, object]] = [
            {
                "job_id": chosen[custom_id],
                "batch_id": batch_id,
                "outcome": (Outcome.SUCCEEDED if status_code == 200 else Outcome.FAILED).value,
                "status_code": status_code,
                "response": json.dumps({"object": "chat.completion", "answer": custom_id}).encode(),
                "prompt_tokens": 10,
                "cached_tokens": 4,
                "completion_tokens": 2,
            }
            for custom_id in custom_ids
        ]
        with self.database.transaction() as conn:
            conn.execute(sa.insert(job_result), rows)
            results.add_progress(conn, rows)

    def end(self, batch_id: str, outcome: Outcome, code: LineErrorCode) -> None:
        with self.database.transaction() as conn:
            results.end_jobs(conn, batch_id, outcome=outcome, error_code=code, only_idle=False)

    def contents(self, file_id: str | None) -> list[dict[str, Any]]:
        """The parsed lines of a batch's file; none where it has no such file."""
        if file_id is None:
            return []
        with self.database.transaction() as conn:
            found = files.get_file(conn, self.tenant_id, file_id)
        assert found is not None
        data = b"".join(self.work.blobs.read(found.store_path))
        assert data.isascii()
        assert data.endswith(b"\n")
        assert len(data) == found.size_bytes
        return [json.loads(line) for line in data.splitlines()]


def make_desk(settings: Settings, database: Database) -> Desk:
    work = Work(
        settings=settings,
        database=database,
        blobs=Blobs(settings.store_location),
        models=MODELS,
        tokenizing=Tokenizing(MODELS),
    )
    with database.transaction() as conn:
        tenant = tenants.ensure_tenant(conn, "acme")
    return Desk(work=work, tenant_id=tenant.id)
