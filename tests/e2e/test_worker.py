"""A real worker process with the simulated engine, fed by the real dispatcher over the real broker."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import sqlalchemy as sa
from celery import Celery
from seeds import MODEL, QUEUE, add_batch, add_jobs, add_tenant
from worker_processes import (
    Worker,
    boot_states,
    cohort_states,
    count_results,
    running,
    wait_until,
    write_fleet,
)

from service.core.model import BatchStatus
from service.settings import Settings
from service.store.session import Database
from service.store.tables import batch, instance_boot, job, job_result
from workers.engines.tree import is_alive, load_record

JOBS = 200
GROUPS = [line % 4 for line in range(JOBS)]


class Cluster:
    """Starts workers, and ends what it started."""

    def __init__(self, settings: Settings, database: Database, stack: ExitStack) -> None:
        self.settings = settings
        self.database = database
        self._stack = stack

    def worker(self, name: str = "one") -> Worker:
        worker = Worker(self.settings, name)
        self._stack.callback(worker.kill)
        return worker

    def ready_worker(self, name: str = "one") -> Worker:
        worker = self.worker(name)
        before = boot_states(self.database).count("ready")
        wait_until(lambda: boot_states(self.database).count("ready") > before, 30, lambda: worker.log)
        return worker

    def dispatcher(self) -> None:
        log = self.settings.state_folder / "dispatcher.log"
        self._stack.enter_context(running("-m", "service", "dispatch", settings=self.settings, log=log))

    def submit(self) -> list[int]:
        with self.database.transaction() as conn:
            tenant = add_tenant(conn)
            return add_jobs(conn, tenant, add_batch(conn, tenant), GROUPS)


@pytest.fixture
def cluster(settings: Settings, database: Database, broker_url: str) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(settings, database, stack)


def test_a_worker_answers_a_batch_and_says_what_was_cached(cluster: Cluster) -> None:
    write_fleet(cluster.settings, speed=20)
    jobs = cluster.submit()
    worker = cluster.ready_worker()
    cluster.dispatcher()
    wait_until(lambda: count_results(cluster.database) == JOBS, 60, lambda: worker.log)
    wait_until(lambda: set(cohort_states(cluster.database)) == {"done"}, 10, lambda: worker.log)
    with cluster.database.transaction() as conn:
        rows = conn.execute(sa.select(job_result).order_by(job_result.c.job_id)).all()
    assert [row.job_id for row in rows] == jobs
    assert {row.outcome for row in rows} == {"succeeded"}
    body = json.loads(rows[0].response)
    assert body["simulated"] is True
    assert body["choices"][0]["message"]["content"].startswith("simulated")
    prompt_tokens, cached_tokens = sum(row.prompt_tokens for row in rows), sum(row.cached_tokens for row in rows)
    predicted = sum(row.predicted_cached_tokens for row in rows)
    assert (prompt_tokens, cached_tokens) == (JOBS * 384, (JOBS - 4) * 320)  # 320 shared tokens, computed once a group
    assert cached_tokens == predicted
    firsts = [(row.job_id, row.cohort_id, row.cached_tokens) for row in rows if row.miss_cause == "first_of_group"]
    assert [cached for _, _, cached in firsts].count(0) == 4, firsts
    assert len(firsts) == 4, firsts
    assert worker.terminate() == 0
    assert boot_states(cluster.database) == ["gone"]
    assert "Traceback" not in worker.log


def test_a_killed_worker_loses_no_job_and_answers_none_twice(cluster: Cluster) -> None:
    write_fleet(cluster.settings, speed=0.5)
    jobs = cluster.submit()
    first = cluster.ready_worker()
    cluster.dispatcher()
    wait_until(lambda: 20 < count_results(cluster.database) < JOBS, 60, lambda: first.log)
    first.kill()
    write_fleet(cluster.settings, speed=20)
    second = cluster.worker()  # its predecessor is provably dead: it need not wait for the heartbeat to grow stale
    wait_until(lambda: count_results(cluster.database) == JOBS, 60, lambda: second.log)
    with cluster.database.transaction() as conn:
        rows = conn.execute(sa.select(job_result.c.job_id, job_result.c.attempt)).all()
    assert sorted(row.job_id for row in rows) == jobs
    assert {row.attempt for row in rows} >= {1, 2}
    assert boot_states(cluster.database) == ["gone", "ready"]


def test_a_drain_gives_back_what_did_not_run_and_is_no_failure(cluster: Cluster) -> None:
    write_fleet(cluster.settings, speed=0.2)
    cluster.submit()
    worker = cluster.ready_worker()
    cluster.dispatcher()
    wait_until(lambda: count_results(cluster.database) > 10, 60, lambda: worker.log)
    assert worker.terminate() == 0
    assert 10 < count_results(cluster.database) < JOBS
    assert boot_states(cluster.database) == ["gone"]
    wait_until(lambda: set(cohort_states(cluster.database)) <= {"done", "ready"}, 10, lambda: worker.log)
    with cluster.database.transaction() as conn:
        failures = conn.execute(sa.text("select sum(failures) from cohort")).scalar_one()
        crashes = conn.execute(sa.select(sa.func.sum(job.c.crashes))).scalar_one()
    assert (failures, crashes) == (0, 0)


def test_jobs_of_a_cancelled_batch_are_aborted_in_flight(cluster: Cluster) -> None:
    write_fleet(cluster.settings, speed=0.05)
    cluster.submit()
    worker = cluster.ready_worker()
    cluster.dispatcher()
    wait_until(lambda: "running" in cohort_states(cluster.database), 60, lambda: worker.log)
    with cluster.database.transaction() as conn:
        conn.execute(sa.update(batch).values(status=BatchStatus.CANCELLING, cancelling_at=sa.func.now()))
    wait_until(lambda: "running" not in cohort_states(cluster.database), 30, lambda: worker.log)
    with cluster.database.transaction() as conn:
        rows = conn.execute(sa.select(job_result.c.outcome, job_result.c.error_code)).all()
    assert ("cancelled", "batch_cancelled") in [tuple(row) for row in rows]


def test_a_boot_that_was_marked_gone_is_followed_by_a_new_one(cluster: Cluster) -> None:
    write_fleet(cluster.settings, speed=20)
    worker = cluster.ready_worker()
    with cluster.database.transaction() as conn:
        conn.execute(sa.update(instance_boot).values(state="gone"))
    wait_until(lambda: boot_states(cluster.database) == ["gone", "ready"], 20, lambda: worker.log)
    cluster.submit()
    cluster.dispatcher()
    wait_until(lambda: count_results(cluster.database) == JOBS, 60, lambda: worker.log)


def test_messages_that_mean_nothing_are_dropped(cluster: Cluster, broker_url: str) -> None:
    write_fleet(cluster.settings, speed=20)
    app = Celery(broker=broker_url)
    for args in ([], ["x", 1], [1, 2, 3], [12345, 1]):
        app.send_task("cohort", args=args, queue=QUEUE, retry=False)
    worker = cluster.ready_worker()
    cluster.submit()
    cluster.dispatcher()
    wait_until(lambda: count_results(cluster.database) == JOBS, 60, lambda: worker.log)
    assert worker.log.count("malformed message dropped") == 3
    assert worker.log.count("stale message dropped: cohort=12345") == 1
    assert "Traceback" not in worker.log


def test_a_second_worker_of_one_instance_is_refused(cluster: Cluster) -> None:
    write_fleet(cluster.settings, speed=20)
    cluster.ready_worker()
    second = cluster.worker()
    assert second.popen.wait(30) == 1
    assert "Another live worker holds this instance's queue." in second.log.splitlines()[-1]
    assert "Traceback" not in second.log


@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        ({"database_url": "postgresql://nobody@127.0.0.1:1/none"}, 1, "check DATABASE_URL"),
        ({"broker_url": "redis://127.0.0.1:1/0"}, 1, "check BROKER_URL"),
        ({"database_url": "nonsense"}, 2, "DATABASE_URL is not a database URL"),
    ],
)
def test_a_worker_that_cannot_start_says_why_in_one_sentence(
    cluster: Cluster, change: dict[str, str], status: int, says: str
) -> None:
    write_fleet(cluster.settings, speed=20)
    cluster.settings = dataclasses.replace(cluster.settings, **change)
    worker = cluster.worker()
    assert worker.popen.wait(60) == status
    assert says in worker.log.splitlines()[-1]
    assert "Traceback" not in worker.log


def test_a_worker_whose_database_goes_away_while_it_starts_says_so(cluster: Cluster) -> None:
    write_fleet(cluster.settings, speed=20)
    with cluster.database.transaction() as conn:
        name = conn.execute(sa.text("select current_database()")).scalar_one()
        conn.execute(sa.text(f"alter database {name} set lock_timeout = '200ms'"))
    with cluster.database.transaction() as conn:
        conn.execute(sa.text("lock table instance_boot in access exclusive mode"))
        worker = cluster.worker()
        assert worker.popen.wait(60) == 1
    assert "check DATABASE_URL" in worker.log.splitlines()[-1]
    assert "Traceback" not in worker.log


@pytest.mark.engine
def test_a_worker_told_to_stop_while_its_engine_loads_leaves_nothing(cluster: Cluster) -> None:
    write_fleet(cluster.settings, speed=20)
    weights = cluster.settings.state_folder / "weights"
    weights.mkdir()
    (weights / "config.json").write_text("{}")
    cluster.settings.instances_path.write_text(
        f'[instances.one]\nengine = "vllm"\nmodel = "{MODEL}"\nweights = "{weights}"\n'
    )
    worker = cluster.worker()
    record = cluster.settings.state_folder / "run" / "engine-one.json"
    wait_until(lambda: len(load_record(record)) >= 2, 60, lambda: worker.log)  # the keeper, and vLLM at its imports
    family = load_record(record)
    assert worker.terminate() == 0
    assert [process for process in family if is_alive(process)] == []
    assert boot_states(cluster.database) == ["gone"]
    assert "Traceback" not in worker.log
