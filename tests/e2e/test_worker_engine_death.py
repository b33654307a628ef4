"""An engine that dies under a worker: its jobs return, a new boot follows, and what kills it every time is ended."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import fake_server
import httpx
import pytest
import sqlalchemy as sa
from seeds import MODEL, add_batch, add_jobs, add_tenant
from worker_processes import Worker, boot_states, cohort_states, count_results, running, wait_until

from service.children import spawn
from service.ports import free_port, is_port_free
from service.settings import Settings, child_environment
from service.store.session import Database
from service.store.tables import job, job_result

JOBS = 12


class Attached:
    """A worker attached to a server that this test starts and kills."""

    def __init__(self, settings: Settings, database: Database, stack: ExitStack) -> None:
        self.settings = settings
        self.database = database
        self.port = free_port()
        self._stack = stack
        settings.state_folder.mkdir(parents=True, exist_ok=True)
        settings.models_path.write_text(f"[models.{MODEL}]\n")
        settings.instances_path.write_text(
            f'[instances.one]\nengine = "openai"\nmodel = "{MODEL}"\nurl = "http://127.0.0.1:{self.port}"\n'
            "options = { max_num_seqs = 2, kv_capacity_tokens = 4096, block_size = 32 }\n"
        )

    def server(self, seconds: float) -> subprocess.Popen[bytes]:
        argv = [sys.executable, fake_server.__file__, str(self.port), "honours", str(seconds)]
        server = spawn(argv, environment=child_environment(self.settings), output=subprocess.DEVNULL)
        self._stack.callback(server.wait)
        self._stack.callback(server.kill)
        wait_until(lambda: not is_port_free(self.port), 10)
        return server

    def worker(self) -> Worker:
        worker = Worker(self.settings)
        self._stack.callback(worker.kill)
        return worker

    def dispatcher(self) -> None:
        log = self.settings.state_folder / "dispatcher.log"
        self._stack.enter_context(running("-m", "service", "dispatch", settings=self.settings, log=log))

    def submit(self, count: int) -> list[int]:
        with self.database.transaction() as conn:
            tenant = add_tenant(conn)
            return add_jobs(conn, tenant, add_batch(conn, tenant), list(range(count)))

    def crashes(self) -> list[int]:
        with self.database.transaction() as conn:
            return list(conn.execute(sa.select(job.c.crashes).order_by(job.c.id)).scalars())


@pytest.fixture
def attached(settings: Settings, database: Database, broker_url: str) -> Iterator[Attached]:
    with ExitStack() as stack:
        yield Attached(settings, database, stack)


@pytest.mark.parametrize("is_sudden", [True, False])
def test_jobs_in_flight_at_a_death_return_and_are_answered_by_the_next_boot(
    attached: Attached, is_sudden: bool
) -> None:
    server = attached.server(seconds=60)
    worker = attached.worker()
    wait_until(lambda: boot_states(attached.database) == ["ready"], 30, lambda: worker.log)
    jobs = attached.submit(JOBS)
    attached.dispatcher()
    wait_until(lambda: "running" in cohort_states(attached.database), 30, lambda: worker.log)
    if is_sudden:
        server.kill()
    else:  # as vLLM does: 500 to all that it has, and an exit some seconds later
        httpx.post(f"http://127.0.0.1:{attached.port}/die", json={}, trust_env=False)
    server.wait()
    wait_until(lambda: boot_states(attached.database)[0] == "gone", 60, lambda: worker.log)
    attached.server(seconds=0)
    wait_until(lambda: boot_states(attached.database)[-1] == "ready", 60, lambda: worker.log)
    wait_until(lambda: count_results(attached.database) == JOBS, 60, lambda: worker.log)
    assert "retry: job=" not in worker.log  # those that were answered 500 are blamed, and no others in their place
    assert 1 <= sum(attached.crashes()) <= 6  # what was in flight: at most max_num_seqs + 4
    with attached.database.transaction() as conn:
        rows = conn.execute(sa.select(job_result.c.job_id, job_result.c.outcome)).all()
    assert sorted(row.job_id for row in rows) == jobs
    assert {row.outcome for row in rows} == {"succeeded"}
    assert "Traceback" not in worker.log


def test_a_job_with_three_crashes_is_ended_and_not_run(attached: Attached) -> None:
    attached.server(seconds=0)
    worker = attached.worker()
    attached.submit(2)
    with attached.database.transaction() as conn:
        conn.execute(sa.update(job).where(job.c.line_no == 1).values(crashes=3))
    attached.dispatcher()
    wait_until(lambda: count_results(attached.database) == 2, 60, lambda: worker.log)
    with attached.database.transaction() as conn:
        rows = conn.execute(
            sa.select(job_result.c.outcome, job_result.c.error_code).order_by(job_result.c.job_id)
        ).all()
    assert [tuple(row) for row in rows] == [("failed", "engine_crash"), ("succeeded", None)]
    wait_until(lambda: set(cohort_states(attached.database)) == {"done"}, 10, lambda: worker.log)
