"""/metrics over real rows: what a scrape shows, that it counts each result once, and who may look."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from api_fixtures import Api, api, check_refused, serve_api
from prometheus_client.parser import text_string_to_metric_families
from seeds import FACTS, MODEL, add_batch, add_boot, add_jobs, add_tenant
from test_stats import add_result

from service.api.metrics import Metrics
from service.core.model import CohortState, MissCause, Outcome
from service.settings import Settings
from service.store import backlog, gauges, health, instances
from service.store.session import Database
from service.store.tables import cohort, instance_boot, job_result

__all__ = ["api"]  # a fixture

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(http: httpx.Client, **headers: str) -> Samples:
    answer = http.get("/metrics", headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


@pytest.fixture
def rows(database: Database) -> dict[str, Any]:
    """Six jobs, three ended on `one` and one nowhere; two wait in a cohort and two run; a second boot that is wrong."""
    with database.transaction() as conn:
        tenant_id = add_tenant(conn)
        add_batch(conn, tenant_id)
        ids = add_jobs(conn, tenant_id, "batch_1", [1, 1, 1, 2, 2, 2, 3, 3])
        one = add_boot(conn, "one")
        two = add_boot(conn, "two", pid=2, ready=False)
        instances.mark_ready(conn, two, replace(FACTS, key_agrees=False, alarm="tokens"))
        add_result(conn, ids[0], one, 0, predicted_cached_tokens=0, miss_cause=MissCause.FIRST_OF_GROUP, attempt=1)
        add_result(conn, ids[1], one, 320, attempt=1, queue_ms=1500, run_ms=500)
        add_result(conn, ids[2], one, 96, miss_cause=MissCause.EVICTED, attempt=2)
        add_result(conn, ids[3], None, None, outcome=Outcome.CANCELLED, prompt_tokens=None, attempt=None)
        for sequence, part in enumerate((ids[4:6], ids[6:8])):
            row = backlog.NewCohort(
                model=MODEL,
                queue="instance.one",
                sequence=sequence,
                priority=1,
                alone=False,
                body_bytes=10,
                estimated_seconds=1.0,
                job_ids=part,
                predicted_cached_tokens=[0, 0],
                first_of_group=[True, False],
            )
            backlog.insert_cohorts(conn, [row])
        running = sa.select(sa.func.min(cohort.c.id)).scalar_subquery()
        conn.execute(sa.update(cohort).where(cohort.c.id == running).values(state=CohortState.RUNNING))
        add_result(conn, ids[4], one, None, attempt=1)
    return {"ids": ids, "one": one}


def test_a_scrape_shows_the_fleet_and_its_cache(api: Api, rows: dict[str, Any]) -> None:
    found = scrape(api.http)
    one = {"model": MODEL, "instance": "one"}
    assert value(found, "trunkline_jobs_total", **one, outcome="succeeded") == 4
    assert value(found, "trunkline_jobs_total", model="", instance="", outcome="cancelled") == 1
    assert value(found, "trunkline_cached_tokens_total", **one) == 416
    assert value(found, "trunkline_prompt_tokens_total", **one) == 3 * 384
    assert value(found, "trunkline_predicted_cached_tokens_total", **one) == 640
    assert value(found, "trunkline_unmeasured_jobs_total", instance="one") == 1
    assert value(found, "trunkline_attempts_total", **one) == 5
    assert value(found, "trunkline_queue_seconds_sum", **one) == 1.5
    assert value(found, "trunkline_missing_tokens_total", **one, cause="evicted") == 224
    assert value(found, "trunkline_miss_computed_tokens_total", **one, cause="first_of_group") == 384
    assert value(found, "trunkline_miss_jobs_total", **one, cause="evicted") == 1
    state = {"model": MODEL, "engine": "simulated", "instance": "one"}
    assert value(found, "trunkline_instance_state", **state, state="ready") == 1
    assert value(found, "trunkline_instance_state", **state, state="draining") == 0
    assert value(found, "trunkline_key_mismatch", instance="one") == 0
    assert value(found, "trunkline_key_mismatch", instance="two") == 1
    normal = {"instance": "one", "priority": "normal"}
    assert value(found, "trunkline_waiting_jobs", **normal) == 2
    assert value(found, "trunkline_in_flight_jobs", **normal) == 1
    assert value(found, "trunkline_waiting_jobs", instance="two", priority="interactive") == 0
    assert value(found, "trunkline_open_cohorts", **normal) == 2
    assert value(found, "trunkline_open_cohort_jobs", **normal) == 4
    assert 86_000 < value(found, "trunkline_deadline_slack_seconds", priority="normal") <= 86_400
    labels = {name for _, sample in found for name, _ in sample}
    assert labels == {"cause", "engine", "instance", "model", "outcome", "priority", "state"}


def test_results_are_counted_once_and_a_slow_transaction_is_waited_for(
    database: Database, rows: dict[str, Any]
) -> None:
    now = [0.0]
    seen = Metrics(clock=lambda: now[0])

    def jobs() -> int:
        return sum(part.jobs for part in seen.look(database.run).sums.values())

    assert jobs() == 5
    with database.engine.begin() as slow:  # writes first, commits last
        add_result(slow, rows["ids"][5], rows["one"], 320)
        with database.transaction() as conn:
            add_result(conn, rows["ids"][6], rows["one"], 320)
        assert jobs() == 5  # not looked again within some seconds
        now[0] = 10.0
        assert jobs() == 5  # what committed lies above the one that is open
    now[0] = 20.0
    assert jobs() == 7
    now[0] = 30.0
    assert jobs() == 7
    assert sum(part.jobs for part in Metrics().look(database.run).sums.values()) == 7


def test_a_failed_read_is_no_half_counted_one(database: Database, rows: dict[str, Any]) -> None:
    seen = Metrics(clock=iter(range(0, 1000, 10)).__next__)
    assert sum(part.jobs for part in seen.look(database.run).sums.values()) == 5
    with database.transaction() as conn:
        add_result(conn, rows["ids"][5], rows["one"], 320)
        conn.execute(sa.text("alter table instance_boot rename to away"))
    with pytest.raises(sa.exc.ProgrammingError):
        seen.look(database.run)
    with database.transaction() as conn:
        conn.execute(sa.text("alter table away rename to instance_boot"))
    assert sum(part.jobs for part in seen.look(database.run).sums.values()) == 6


def test_later_reads_do_not_go_over_the_table(database: Database, rows: dict[str, Any]) -> None:
    with database.transaction() as conn:
        conn.execute(
            sa.text("insert into job_result (job_id, outcome) select n, 'failed' from generate_series(1000, 60000) n")
        )
        conn.execute(sa.text("select brin_summarize_new_values('ix_job_result_recorded_xid')"))
    with database.transaction() as conn:
        mark = gauges.horizon(conn)
        conn.execute(sa.text("analyze job_result"))
    statements: list[tuple[str, Any]] = []

    @sa.event.listens_for(database.engine, "before_cursor_execute")
    def note(conn: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        statements.append((statement, parameters))

    with database.transaction() as conn:
        assert gauges.sums_between(conn, mark, mark + 100) == {}
        statement, parameters = statements[-1]
        plan = conn.exec_driver_sql(f"explain {statement}", parameters).scalars().all()
    assert not any("Seq Scan on job_result" in line for line in plan), plan
    assert any("recorded_xid" in line and "Index Cond" in line for line in plan), plan


def test_a_key_is_asked_for_where_there_is_one(settings: Settings, database: Database, broker_url: str) -> None:
    with serve_api(settings, database, broker_url) as guarded:
        key = guarded.make_key("default")
        check_refused(guarded.http.get("/metrics"), 401, "invalid_api_key")
        check_refused(guarded.http.get("/metrics", headers={"authorization": "Bearer no"}), 401, "invalid_api_key")
        assert scrape(guarded.http, authorization=f"Bearer {key}") == {}  # nothing has run here


def test_a_queue_that_nobody_serves_shows_under_its_name(api: Api, database: Database, rows: dict[str, Any]) -> None:
    with database.transaction() as conn:
        conn.execute(sa.update(instance_boot).values(state="gone"))
        conn.execute(sa.delete(job_result))
        (stranded,) = health.stranded_queues(conn)
    found = scrape(api.http)
    assert value(found, "trunkline_waiting_jobs", instance="instance.one", priority="normal") == 2
    assert (stranded.queue, stranded.cohorts) == ("instance.one", 2)
