"""Webhooks from real processes: a control worker that is killed, receivers that hang, the command line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from control_fixtures import Desk, jsonl, make_desk, request
from hook_server import HookServer, receiving
from typer.testing import CliRunner, Result

from service.broker import CONTROL_QUEUE, Publisher, make_app
from service.core.model import Outcome
from service.core.webhook import secret_text
from service.courier import PLACES_PER_TENANT
from service.errors import TrunklineError
from service.reaper import Reaper
from service.settings import Settings, child_environment, describe_settings
from service.store import tenants, webhooks
from service.store.session import Database
from service.store.webhooks import EndedJob
from trunkline.cli.app import build_app

pytestmark = pytest.mark.embedded_only

BAD = b"no JSON\n"


@pytest.fixture
def own(settings: Settings, broker_url: str) -> Settings:
    settings.models_path.parent.mkdir(parents=True, exist_ok=True)
    settings.models_path.write_text("[models.tiny]\n")
    return replace(settings, webhooks_allow_private=True, webhooks_timeout_seconds=300.0)


@pytest.fixture
def desk(own: Settings, database: Database) -> Desk:
    return make_desk(own, database)


@pytest.fixture
def receiver() -> Iterator[HookServer]:
    with receiving(HookServer()) as server:
        yield server


@contextmanager
def worker(settings: Settings, log_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A real control worker with two threads."""
    command = [sys.executable, "-m", "celery", "-A", "service.celery_app", "worker", "-Q", CONTROL_QUEUE]
    options = ["-P", "threads", "-c", "2", "-n", "control@%h", "--loglevel", "INFO"]
    with log_path.open("ab") as log:
        process = subprocess.Popen([*command, *options], env=child_environment(settings), stdout=log, stderr=log)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(30)


def sweep_until(settings: Settings, database: Database, is_true: Callable[[], bool]) -> None:
    """As the dispatcher does: find what is due, send its hint."""
    assert settings.broker_url
    reaper = Reaper(settings, database, Publisher(make_app(settings, settings.broker_url, queue=CONTROL_QUEUE)))
    deadline = time.monotonic() + 90
    while not is_true():
        assert time.monotonic() < deadline
        reaper.step()
        threading.Event().wait(0.1)  # other processes work: there is nothing to wake us


def subscribe(desk: Desk, tenant_id: int, url: str) -> str:
    with desk.database.transaction() as conn:
        webhooks.set_url(conn, tenant_id, url)
        return secret_text(webhooks.ensure_secret(conn, tenant_id))


def states(desk: Desk, tenant_id: int) -> list[str]:
    with desk.database.transaction() as conn:
        return [event.state for event in webhooks.list_events(conn, tenant_id, 1_000)]


def test_a_worker_that_is_killed_while_it_delivers_loses_nothing(
    own: Settings, desk: Desk, receiver: HookServer, tmp_path: Path
) -> None:
    """The receiver has it, the worker dies before it can write so, and its message is gone: the same event again."""
    secret = subscribe(desk, desk.tenant_id, receiver.url)
    log = tmp_path / "worker.log"
    receiver.manner.hangs = True
    with worker(own, log) as first:
        batch_id = desk.take_in(BAD)
        sweep_until(own, desk.database, lambda: len(receiver.hooks) == 1)
        first.send_signal(signal.SIGKILL)
        first.wait(30)
    receiver.manner.hangs = False
    with worker(own, log) as second:
        sweep_until(own, desk.database, lambda: states(desk, desk.tenant_id) == ["delivered"])
        second.send_signal(signal.SIGTERM)
        assert second.wait(30) == 0
    client = openai.OpenAI(api_key="none", webhook_secret=secret)
    told = [client.webhooks.unwrap(hook.body, hook.headers) for hook in receiver.wait_for(2)]
    assert [event.type for event in told] == ["batch.failed", "batch.failed"]
    assert len({event.id for event in told}) == 1
    assert {event.data.id for event in told} == {batch_id}  # type: ignore[union-attr]
    said = log.read_text()
    assert f"webhook {told[0].id} (batch.failed) to 127.0.0.1:{receiver.port}, try 1: 200" in said
    for hidden in ("querysecret", "secret answer", secret):
        assert hidden not in said


def test_receivers_that_hang_hold_up_nobody_else(
    own: Settings, desk: Desk, receiver: HookServer, tmp_path: Path
) -> None:
    """More webhooks than the worker has threads, to a receiver that never answers: batches and the webhooks of another
    tenant go their way. A worker that is told to stop gives the webhooks back, and none of them counts as a try."""
    with receiving(HookServer()) as slow:
        slow.manner.hangs = True
        with desk.database.transaction() as conn:
            stuck = tenants.ensure_tenant(conn, "stuck").id
            ended = partial(EndedJob, tenant_id=stuck, url=slow.url, outcome=Outcome.SUCCEEDED)
            webhooks.announce_jobs(conn, [ended(public_id=f"job_{n}") for n in range(12)])
        subscribe(desk, desk.tenant_id, receiver.url)
        with worker(own, tmp_path / "worker.log") as process:
            sweep_until(own, desk.database, lambda: len(slow.hooks) == PLACES_PER_TENANT)
            batch_id, _ = desk.create(jsonl([request("a")]))
            sweep_until(own, desk.database, lambda: desk.batch(batch_id).intake_done)
            desk.answer(batch_id, ["a"])
            sweep_until(own, desk.database, lambda: states(desk, desk.tenant_id) == ["delivered"])
            assert len(slow.hooks) == PLACES_PER_TENANT
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        assert states(desk, stuck) == ["pending"] * 12
        with desk.database.transaction() as conn:
            assert {event.tries for event in webhooks.list_events(conn, stuck, 100)} == {0}
    assert "did not stop in time" not in (tmp_path / "worker.log").read_text()


# The command line


def run(settings: Settings, *arguments: str) -> Result:
    words = ["webhooks", *arguments]
    names = {name for name, *_ in describe_settings()}
    ours = {name: value for name, value in child_environment(settings).items() if name in names}
    return CliRunner(env=ours).invoke(build_app(words), words)


def output(settings: Settings, *arguments: str) -> str:
    done = run(settings, *arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


def failure(settings: Settings, *arguments: str) -> TrunklineError:
    """What the script `trunkline` prints as one sentence."""
    error = run(settings, *arguments).exception
    assert isinstance(error, TrunklineError)
    return error


def test_the_command_line_from_set_to_remove(own: Settings, desk: Desk, receiver: HookServer) -> None:
    assert json.loads(output(own, "show", "--json")) == {"tenant": "default", "url": None, "secret": None}
    secret = output(own, "set", receiver.url).strip()
    assert json.loads(output(own, "show", "--json")) == {"tenant": "default", "url": receiver.url, "secret": secret}
    tried = json.loads(output(own, "test", "--json"))
    (hook,) = receiver.wait_for(1)
    event: Any = openai.OpenAI(api_key="none", webhook_secret=secret).webhooks.unwrap(hook.body, hook.headers)
    assert (event.id, event.type) == (tried["id"], "webhook.test")
    rotated = output(own, "rotate").strip()
    assert rotated != secret
    receiver.manner.statuses.append(500)
    failed = failure(own, "test")
    assert (failed.exit_status, str(failed)) == (1, "The webhook was not delivered. (http_500)")
    openai.OpenAI(api_key="none", webhook_secret=rotated).webhooks.unwrap(
        receiver.wait_for(2)[1].body, receiver.wait_for(2)[1].headers
    )
    listed = json.loads(output(own, "list", "--json"))["events"]
    assert [(row["type"], row["tries"], row["state"], row["last_error"]) for row in listed] == [
        ("webhook.test", 1, "given_up", "http_500"),
        ("webhook.test", 1, "delivered", None),
    ]
    shown = output(own, "list") + json.dumps(listed)
    assert f"127.0.0.1:{receiver.port}" in json.dumps(listed)
    assert "querysecret" not in shown
    output(own, "remove")
    assert "none" in output(own, "show")
    assert failure(own, "test").exit_status == 2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("set", "http://user:secret@example.com/"), "an http or https URL"),
        (("show", "--tenant", "nobody"), "trunkline keys create nobody"),
    ],
)
def test_what_the_command_line_refuses(own: Settings, desk: Desk, arguments: tuple[str, ...], named: str) -> None:
    error = failure(own, *arguments)
    assert error.exit_status == 2
    assert named in str(error)
    assert "secret" not in str(error)


def test_a_private_address_is_refused_until_it_is_allowed(own: Settings, desk: Desk, receiver: HookServer) -> None:
    """By the script itself."""
    output(own, "set", receiver.url)
    done = subprocess.run(
        [sys.executable, "-c", "from trunkline.cli import main; main()", "webhooks", "test"],
        env=child_environment(replace(own, webhooks_allow_private=False)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, receiver.hooks) == (1, [])
    assert done.stderr == "trunkline: The webhook was not delivered. (address_refused)\n"
