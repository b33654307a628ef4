"""What the tests of webhooks share: a tenant of a running API, somebody who waits to be told, and ends to tell of."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import httpx
import openai
import pytest
import sqlalchemy as sa
from api_fixtures import Api, steady  # noqa: F401 - a fixture
from control_fixtures import Desk, jsonl, request
from hook_server import Hook, HookServer, receiving

from service.control import run_task
from service.core.model import TaskKind
from service.core.webhook import secret_text
from service.store import webhooks
from service.store.control_tables import control_task, webhook_event
from service.store.webhooks import Event

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """An API, a tenant of it and its control work, and somebody who waits to be told."""

    api: Api
    desk: Desk
    key: str
    http: httpx.Client
    receiver: HookServer

    def subscribe(self, url: str | None = None) -> str:
        """The tenant wants webhooks; its secret as text."""
        with self.api.database.transaction() as conn:
            webhooks.set_url(conn, self.desk.tenant_id, url or self.receiver.url)
            return secret_text(webhooks.ensure_secret(conn, self.desk.tenant_id))

    def secret(self) -> str:
        with self.api.database.transaction() as conn:
            secret = webhooks.get_receiver(conn, self.desk.tenant_id).secret
        assert secret is not None
        return secret_text(secret)

    def events(self) -> list[Event]:
        with self.api.database.transaction() as conn:
            return webhooks.list_events(conn, self.desk.tenant_id, 100)

    def event(self) -> Event:
        (only,) = self.events()
        return only

    def tasks(self) -> list[sa.Row[Any]]:
        """Of webhooks, oldest first."""
        statement = (
            sa.select(control_task)
            .join(webhook_event, webhook_event.c.id == control_task.c.subject)
            .where(control_task.c.kind == TaskKind.WEBHOOK, webhook_event.c.tenant_id == self.desk.tenant_id)
            .order_by(control_task.c.id)
        )
        with self.api.database.transaction() as conn:
            return list(conn.execute(statement))

    def deliver(self) -> sa.Row[Any]:
        """One more try of the one task, now; the task afterwards."""
        (task,) = self.tasks()
        self.desk.make_due(task.id)
        run_task(self.desk.work, task.id)
        return self.desk.task(task.id)

    def submit(self, **fields: Any) -> str:
        body = {"endpoint": CHAT, "body": BODY, "webhook_url": self.receiver.url, **fields}
        return str(self.http.post("/v1/jobs", json=body).raise_for_status().json()["id"])

    def open(self, hook: Hook, secret: str) -> dict[str, Any]:
        """What the SDK reads in it, once it has verified it."""
        client = openai.OpenAI(api_key="none", webhook_secret=secret)
        event: dict[str, Any] = client.webhooks.unwrap(hook.body, hook.headers).to_dict()
        return event


@pytest.fixture(scope="module")
def office(steady: Api) -> Api:
    """One API for all tests, each of which is another tenant."""
    quick = {"webhooks_allow_private": True, "webhooks_retry_seconds": 0.01, "webhooks_timeout_seconds": 5.0}
    return replace(steady, settings=replace(steady.settings, **quick))


@pytest.fixture
def post(office: Api) -> Iterator[Post]:
    name = f"tenant-{secrets.token_hex(6)}"
    key = office.make_key(name)
    with receiving(HookServer()) as receiver, office.as_tenant(key) as http:
        yield Post(api=office, desk=office.desk(name), key=key, http=http, receiver=receiver)


def complete(post: Post) -> str:
    """A batch of the API that all went well with; its id."""
    file_id = post.api.upload(jsonl([request("a")]), post.http)
    batch_id = str(post.api.create(file_id, post.http)["id"])
    run_task(post.desk.work, post.desk.start(TaskKind.INTAKE, batch_id))
    post.desk.answer(batch_id, ["a"])
    (export,) = post.desk.finalize()
    run_task(post.desk.work, export)
    return batch_id


def fail(post: Post) -> str:
    return post.desk.take_in(b"no JSON\n")


def cancel(post: Post) -> str:
    batch_id = post.desk.take_in(jsonl([request("a"), request("b")]))
    run_task(post.desk.work, post.desk.cancel(batch_id))
    return batch_id


def expire(post: Post) -> str:
    batch_id, _ = post.desk.create(jsonl([request("a")]), window_seconds=0)
    run_task(post.desk.work, post.desk.start(TaskKind.EXPIRE, batch_id))
    return batch_id
