"""Webhooks: written with the end they tell of, delivered at least once, verified by the `openai` SDK."""

from __future__ import annotations

import asyncio
import json
import logging
from functools import partial
from typing import Any

import openai
import pytest
import sqlalchemy as sa
from api_fixtures import steady  # noqa: F401 - a fixture
from control_fixtures import jsonl, request
from seeds import add_boot
from test_cohorts import finished
from webhook_fixtures import BODY, CHAT, Post, cancel, complete, expire, fail, office, post  # noqa: F401 - fixtures

from service.control import run_task
from service.core.model import BatchStatus, CohortState, LineErrorCode, Outcome, TaskState
from service.core.webhook import secret_text
from service.courier import Courier
from service.errors import FenceLost
from service.ports import free_port
from service.store import batches, control, results, tenants, webhooks
from service.store.cohorts import Claim
from service.store.control import MAX_FAILURES
from service.store.control_tables import control_task, webhook_event
from service.store.tables import cohort, job
from service.webhooks import run_webhook, send


@pytest.mark.parametrize("end", [complete, fail, cancel, expire])
def test_the_end_of_a_batch_is_told(post: Post, end: Any) -> None:
    secret = post.subscribe()
    batch_id = end(post)
    status = post.desk.batch(batch_id).status
    assert post.deliver().state == TaskState.DONE
    (hook,) = post.receiver.wait_for(1)
    event = post.open(hook, secret)
    assert event == {
        "id": hook.headers["webhook-id"],
        "object": "event",
        "created_at": event["created_at"],
        "type": f"batch.{status}",
        "data": {"id": batch_id},
    }
    assert hook.path == "/hook?key=querysecret"
    assert hook.headers["host"] == f"127.0.0.1:{post.receiver.port}"
    assert hook.headers["content-type"] == "application/json"
    batch = post.api.sdk(post.key).batches.retrieve(event["data"]["id"])
    assert batch.status == status
    clocks = {batch.completed_at, batch.failed_at, batch.cancelled_at, batch.expired_at}
    assert event["created_at"] in clocks
    told = post.event()
    assert (told.state, told.tries, told.last_error) == ("delivered", 1, None)


async def test_the_async_sdk_verifies_it_too_and_another_secret_does_not(post: Post) -> None:
    secret = post.subscribe()
    fail(post)
    await asyncio.to_thread(post.deliver)
    (hook,) = post.receiver.wait_for(1)
    client = openai.AsyncOpenAI(api_key="none", webhook_secret=secret)
    assert client.webhooks.unwrap(hook.body, hook.headers).type == "batch.failed"
    with post.api.database.transaction() as conn:
        other = secret_text(webhooks.rotate_secret(conn, post.desk.tenant_id))
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.unwrap(hook.body, hook.headers, secret=other)


def test_nobody_is_told_where_nobody_asked(post: Post) -> None:
    complete(post)
    stranger = post.api.desk(f"stranger-{post.desk.tenant_id}")
    with post.api.database.transaction() as conn:
        webhooks.set_url(conn, stranger.tenant_id, post.receiver.url)
    fail(post)
    assert (post.events(), post.tasks()) == ([], [])


def test_an_end_that_is_undone_is_not_told(post: Post) -> None:
    post.subscribe()
    batch_id, _ = post.desk.create(jsonl([request("a")]))
    with post.api.database.engine.connect() as conn:
        assert batches.move_batch(conn, batch_id, BatchStatus.FAILED)
        conn.rollback()
    assert (post.events(), post.tasks()) == ([], [])
    with post.api.database.transaction() as conn:
        assert batches.move_batch(conn, batch_id, BatchStatus.FAILED)
        assert not batches.move_batch(conn, batch_id, BatchStatus.FAILED)
        assert not batches.move_batch(conn, batch_id, BatchStatus.EXPIRED)
    assert (post.event().subject, len(post.tasks())) == (batch_id, 1)


# Single jobs


def claim_of(post: Post, job_id: str) -> tuple[Claim, int]:
    """A worker's hold on the job, as dispatcher and worker would have taken it."""
    with post.api.database.transaction() as conn:
        boot_id = add_boot(conn, f"of-{post.desk.tenant_id}")
        values = {"model": "tiny", "queue": "instance.one", "sequence": 1, "n_jobs": 1, "priority": 3, "attempt": 1}
        row = {**values, "state": CohortState.RUNNING, "instance_boot_id": boot_id}
        cohort_id = conn.execute(sa.insert(cohort).values(row).returning(cohort.c.id)).scalar_one()
        key = conn.execute(
            sa.update(job).where(job.c.public_id == job_id).values(cohort_id=cohort_id).returning(job.c.id)
        ).scalar_one()
    claim = Claim(
        cohort_id=cohort_id, attempt=1, boot_id=boot_id, priority=3, sequence=1, alone=True, model="tiny", moved=False
    )
    return claim, key


@pytest.mark.parametrize("outcome", list(Outcome))
def test_the_end_of_a_job_is_told_once(post: Post, outcome: Outcome) -> None:
    """However it ended: each job that asked has one event, and one that did not succeed has failed."""
    job_id = post.submit()
    silent_id = post.submit(webhook_url=None)
    assert post.events() == []
    claim, key = claim_of(post, job_id)
    with post.api.database.transaction() as conn:
        silent = conn.execute(sa.select(job.c.id).where(job.c.public_id == silent_id)).scalar_one()
        results.end_single(conn, silent, Outcome.CANCELLED, LineErrorCode.BATCH_CANCELLED)
        if outcome in (Outcome.SUCCEEDED, Outcome.FAILED):
            assert results.record(conn, claim, [finished(key, outcome)]) == 1
            assert results.record(conn, claim, [finished(key, outcome)]) == 0
        else:
            assert results.end_single(conn, key, outcome, LineErrorCode.BATCH_CANCELLED)
        assert not results.end_single(conn, key, Outcome.EXPIRED, LineErrorCode.BATCH_EXPIRED)
    assert post.deliver().state == TaskState.DONE
    (hook,) = post.receiver.wait_for(1)
    event = post.open(hook, post.secret())
    kind = "job.succeeded" if outcome is Outcome.SUCCEEDED else "job.failed"
    assert (event["type"], event["data"]) == (kind, {"id": job_id})
    assert post.http.get(f"/v1/jobs/{job_id}").json()["status"] == outcome


def test_a_job_that_is_cancelled_over_http_is_told(post: Post) -> None:
    job_id = post.submit()
    post.http.post(f"/v1/jobs/{job_id}/cancel").raise_for_status()
    post.deliver()
    (hook,) = post.receiver.wait_for(1)
    assert post.open(hook, post.secret())["data"] == {"id": job_id}


def test_the_secret_is_there_before_the_first_job_of_a_tenant_ends(post: Post) -> None:
    with post.api.database.transaction() as conn:
        assert webhooks.get_receiver(conn, post.desk.tenant_id).secret is None
    post.submit()
    secret = post.secret()
    post.submit()
    assert post.secret() == secret


@pytest.mark.parametrize(
    "url",
    ["ftp://example.com/", "http://user:secret@example.com/", "http://example.com:25/", "http://a\0b/", "http://"],
)
def test_a_url_that_may_not_be_called_is_refused_at_the_create(post: Post, url: str) -> None:
    answer = post.http.post("/v1/jobs", json={"endpoint": CHAT, "body": BODY, "webhook_url": url})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "webhook_url")
    assert "secret" not in answer.text


# Tries


def test_five_tries_under_one_id_then_it_is_given_up(post: Post) -> None:
    secret = post.subscribe()
    fail(post)
    post.receiver.manner.statuses.extend([500, 404, 302, 429, 503])
    waits = []
    for _ in range(4):
        task = post.deliver()
        assert (task.state, task.failures) == (TaskState.READY, 0)
        waits.append((task.not_before - post_now(post)).total_seconds())
    assert post.deliver().state == TaskState.DONE
    hooks = post.receiver.wait_for(5)
    assert {hook.headers["webhook-id"] for hook in hooks} == {post.event().id}
    assert len({hook.body for hook in hooks}) == 1
    assert [post.open(hook, secret)["type"] for hook in hooks] == ["batch.failed"] * 5
    assert waits[3] > waits[2] > 0  # 5.12 s and 0.64 s; the first two have passed by now
    event = post.event()
    assert (event.state, event.tries, event.last_error) == ("given_up", 5, "http_503")
    run_task(post.desk.work, post.tasks()[0].id)
    assert len(post.receiver.hooks) == 5


def post_now(post: Post) -> Any:
    with post.api.database.transaction() as conn:
        return conn.execute(sa.select(sa.func.clock_timestamp())).scalar_one()


def test_a_later_try_may_succeed(post: Post) -> None:
    post.subscribe()
    fail(post)
    post.receiver.manner.statuses.extend([500, 202])
    assert post.deliver().state == TaskState.READY
    assert post.deliver().state == TaskState.DONE
    event = post.event()
    assert (event.state, event.tries, event.last_error) == ("delivered", 2, None)


def test_gone_means_never_again(post: Post) -> None:
    post.subscribe()
    fail(post)
    post.receiver.manner.statuses.append(410)
    assert post.deliver().state == TaskState.DONE
    event = post.event()
    assert (event.state, event.tries, event.last_error) == ("given_up", 1, "http_410")


def test_a_try_whose_record_was_lost_is_made_again_under_the_same_id(post: Post) -> None:
    """A control worker that stops after it sent and before it wrote: its lease runs out, another one sends again."""
    secret = post.subscribe()
    fail(post)
    (row,) = post.tasks()
    with post.api.database.transaction() as conn:
        first = control.claim_task(conn, row.id, 30.0)
        sending = webhooks.open_event(conn, row.subject)
    assert first is not None
    assert sending is not None
    assert send(post.desk.work.settings, Courier(), sending).status_code == 200
    post.desk.expire_lease(row.id)
    with post.api.database.transaction() as conn:
        assert row.id in webhooks.due_webhooks(conn, 0.0)
    run_task(post.desk.work, row.id)
    with pytest.raises(FenceLost):
        run_webhook(post.desk.work, first)
    hooks = post.receiver.wait_for(2)
    assert len(post.receiver.hooks) == 2
    assert {post.open(hook, secret)["id"] for hook in hooks} == {post.event().id}
    assert (post.event().state, post.event().tries) == ("delivered", 1)


def test_a_webhook_whose_task_dies_touches_no_batch(post: Post) -> None:
    post.subscribe()
    batch_id = complete(post)
    (row,) = post.tasks()
    for _ in range(MAX_FAILURES):
        with post.api.database.transaction() as conn:
            assert control.claim_task(conn, row.id, 30.0) is not None
        post.desk.expire_lease(row.id)
    run_task(post.desk.work, row.id)
    assert post.desk.task(row.id).state == TaskState.DEAD
    assert (post.event().state, post.event().last_error) == ("given_up", "internal_error")
    batch = post.desk.batch(batch_id)
    assert (batch.status, batch.errors) == (BatchStatus.COMPLETED, None)
    assert len(post.desk.contents(batch.output_file_id)) == 1
    assert post.receiver.hooks == []


def test_what_nobody_may_read_is_not_logged(post: Post, caplog: pytest.LogCaptureFixture) -> None:
    secret = post.subscribe()
    with caplog.at_level(logging.INFO, logger="service"):
        fail(post)
        post.receiver.manner.statuses.append(500)
        post.deliver()
        post.deliver()
    said = "\n".join(record.getMessage() for record in caplog.records if record.name.startswith("service"))
    assert post.event().id in said
    assert f"to 127.0.0.1:{post.receiver.port}, try 1: http_500" in said
    assert "try 2: 200" in said
    for hidden in ("querysecret", "/hook", "secret answer", secret):
        assert hidden not in said, hidden


# Whose turn it is


def test_a_tenant_with_many_events_does_not_stand_before_the_others(post: Post) -> None:
    other = post.api.desk(f"other-{post.desk.tenant_id}")
    with post.api.database.transaction() as conn:
        for tenant_id, count in ((post.desk.tenant_id, 5), (other.tenant_id, 2)):
            ended = partial(webhooks.EndedJob, tenant_id=tenant_id, url=post.receiver.url, outcome=Outcome.SUCCEEDED)
            webhooks.announce_jobs(conn, [ended(public_id=f"job_{n}") for n in range(count)])
        rows = conn.execute(
            sa.select(control_task.c.id, webhook_event.c.tenant_id)
            .join(webhook_event, webhook_event.c.id == control_task.c.subject)
            .where(webhook_event.c.tenant_id.in_((post.desk.tenant_id, other.tenant_id)))
        )
        owners = {row.id: row.tenant_id for row in rows}
        assert not owners.keys() & set(control.unpublished_tasks(conn, 0.0))
        chosen = [task_id for task_id in webhooks.due_webhooks(conn, 0.0, per_tenant=3) if task_id in owners]
        assert sorted(owners[task_id] for task_id in chosen) == sorted(
            [post.desk.tenant_id] * 3 + [other.tenant_id] * 2
        )
        assert len(webhooks.due_webhooks(conn, 0.0, per_tenant=3, limit=4)) == 4
        control.mark_published(conn, chosen)
        assert len(owners.keys() & set(webhooks.due_webhooks(conn, 30.0))) == 2


def test_a_tenant_may_not_take_every_place(post: Post) -> None:
    post.subscribe()
    fail(post)
    places = post.desk.work.courier.places
    with places.one_for(post.desk.tenant_id), places.one_for(post.desk.tenant_id):
        with places.one_for(post.desk.tenant_id), places.one_for(post.desk.tenant_id) as is_free:
            assert is_free
            task = post.deliver()
            assert (task.state, task.failures) == (TaskState.READY, 0)
            with places.one_for(post.desk.tenant_id + 1) as is_free:
                assert is_free
        assert (post.receiver.hooks, post.event().tries) == ([], 0)
        assert post.deliver().state == TaskState.DONE
    assert post.event().state == "delivered"


def test_a_new_address_takes_over_what_waits_and_a_removed_one_gives_it_up(post: Post) -> None:
    post.subscribe(f"http://127.0.0.1:{free_port()}/nobody")
    fail(post)
    assert post.deliver().state == TaskState.READY
    assert post.event().last_error == "not_connected"
    post.subscribe()
    assert post.deliver().state == TaskState.DONE
    assert len(post.receiver.hooks) == 1
    fail(post)
    job_id = post.submit()
    post.http.post(f"/v1/jobs/{job_id}/cancel").raise_for_status()
    with post.api.database.transaction() as conn:
        assert webhooks.remove_url(conn, post.desk.tenant_id) == 1
    fail(post)
    for task in post.tasks():
        run_task(post.desk.work, task.id)
    assert [(event.type, event.state, event.last_error) for event in reversed(post.events())] == [
        ("batch.failed", "delivered", None),
        ("batch.failed", "given_up", "removed"),
        ("job.failed", "delivered", None),
    ]
    assert {json.loads(hook.body)["type"] for hook in post.receiver.hooks} == {"batch.failed", "job.failed"}


def test_events_of_another_tenant_are_not_listed(post: Post) -> None:
    post.subscribe()
    fail(post)
    with post.api.database.transaction() as conn:
        stranger = tenants.ensure_tenant(conn, "stranger")
        assert webhooks.list_events(conn, stranger.id, 100) == []
