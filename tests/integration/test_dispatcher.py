"""The dispatcher against real Postgres and a real broker, a pass at a time."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from dataclasses import replace

import pytest
import redis
import sqlalchemy as sa
from seeds import MODEL, add_batch, add_boot, add_jobs, add_tenant

from service import rebalance
from service.broker import Publisher, make_app
from service.core.model import CohortState, Priority
from service.dispatcher import Dispatcher
from service.reaper import Reaper
from service.settings import Settings
from service.store import backlog, dispatching, instances
from service.store.session import Database
from service.store.tables import cohort, instance_boot, job


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """No heartbeat comes from the boots of these tests: they stay fresh however slow the machine is."""
    return replace(settings, stale_boot_seconds=600.0)


@pytest.fixture
def publisher(settings: Settings, broker_url: str) -> Publisher:
    return Publisher(make_app(settings, broker_url, queue="control"))


@pytest.fixture
def dispatcher(settings: Settings, database: Database, publisher: Publisher) -> Dispatcher:
    return Dispatcher(settings, database, publisher)


def seed(database: Database, groups: list[int], *names: str) -> list[int]:
    with database.transaction() as conn:
        for number, name in enumerate(names):
            add_boot(conn, name, pid=number)
        tenant_id = add_tenant(conn)
        return add_jobs(conn, tenant_id, add_batch(conn, tenant_id), groups)


def planned(database: Database) -> dict[str, list[int]]:
    """Queue -> groups of its jobs in planned order (a job's group from its seed order)."""
    with database.transaction() as conn:
        rows = conn.execute(
            sa.select(cohort.c.queue, job.c.id)
            .join(cohort, cohort.c.id == job.c.cohort_id)
            .order_by(cohort.c.queue, cohort.c.sequence, cohort.c.id, job.c.cohort_position)
        ).all()
    queues: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        queues[row.queue].append(row.id)
    return queues


def finish(database: Database, *queues: str) -> None:
    """What is out for these queues is done."""
    is_out = cohort.c.state == CohortState.DISPATCHED
    with database.transaction() as conn:
        conn.execute(sa.update(cohort).where(is_out, cohort.c.queue.in_(queues)).values(state=CohortState.DONE))


def run_out(database: Database, dispatcher: Dispatcher, *queues: str) -> None:
    """Passes with engines that answer at once, until nothing is given out any more."""
    while dispatcher.step():
        finish(database, *queues)


def test_jobs_that_share_a_prefix_run_together_on_one_instance(database: Database, dispatcher: Dispatcher) -> None:
    groups = [number % 8 for number in range(96)]
    random.Random(7).shuffle(groups)
    jobs = seed(database, groups, "one", "two")
    run_out(database, dispatcher, "instance.one", "instance.two")
    group_of = dict(zip(jobs, groups, strict=True))
    runs = {queue: [group_of[job_id] for job_id in ids] for queue, ids in planned(database).items()}
    assert sorted(len(run) for run in runs.values()) == [48, 48]
    changes = sum(a != b for run in runs.values() for a, b in itertools.pairwise(run))
    assert changes == 6  # four whole groups on each instance
    with database.transaction() as conn:
        predicted = conn.execute(sa.select(sa.func.sum(job.c.predicted_cached_tokens))).scalar_one()
    assert predicted == (96 - 8) * 320


def test_an_instance_is_kept_full_and_little_more(database: Database, dispatcher: Dispatcher, broker_url: str) -> None:
    seed(database, [1] * 200, "one")
    published = dispatcher.step()
    assert dispatcher.step() == 0
    with database.transaction() as conn:
        out = conn.execute(
            sa.select(sa.func.sum(cohort.c.n_jobs)).where(cohort.c.state == CohortState.DISPATCHED)
        ).scalar_one()
    assert 24 <= out < 24 + 8  # max_num_seqs is 16; a cohort has at most 8 jobs here
    assert redis.Redis.from_url(broker_url).llen("instance.one") == published


def test_a_new_instance_gets_its_share_of_what_is_not_out_yet(database: Database, dispatcher: Dispatcher) -> None:
    seed(database, [number // 50 for number in range(200)], "one")
    dispatcher.step()
    with database.transaction() as conn:
        add_boot(conn, "two", pid=2)
    run_out(database, dispatcher, "instance.one", "instance.two")
    sizes = {queue: len(ids) for queue, ids in planned(database).items()}
    assert sum(sizes.values()) == 200
    assert 80 <= sizes["instance.two"] <= 110


def test_work_of_a_dead_instance_goes_to_a_living_one(database: Database, dispatcher: Dispatcher) -> None:
    seed(database, [number // 10 for number in range(100)], "one", "two")
    dispatcher.step()
    with database.transaction() as conn:
        boot_id = conn.execute(sa.select(instance_boot.c.id).where(instance_boot.c.name == "two")).scalar_one()
        instances.mark_gone(conn, boot_id, "test")
    finish(database, "instance.one")
    run_out(database, dispatcher, "instance.one")
    assert {queue: len(ids) for queue, ids in planned(database).items()} == {"instance.one": 100}


def test_an_instance_that_runs_dry_takes_what_waits_for_a_slow_one(database: Database, dispatcher: Dispatcher) -> None:
    seed(database, [number // 50 for number in range(200)], "one", "two")
    run_out(database, dispatcher, "instance.two")
    sizes = {queue: len(ids) for queue, ids in planned(database).items()}
    assert sum(sizes.values()) == 200
    assert sizes["instance.one"] <= 24 + 8  # what was out when it stopped


def test_what_is_written_for_a_slow_instance_is_taken_too(database: Database, dispatcher: Dispatcher) -> None:
    jobs = seed(database, [1] * 64, "one", "two")
    with database.transaction() as conn:
        rows = [
            backlog.NewCohort(
                model=MODEL,
                queue="instance.one",
                sequence=first,
                priority=Priority.NORMAL,
                alone=False,
                body_bytes=80,
                estimated_seconds=1.0,
                job_ids=jobs[first : first + 8],
                predicted_cached_tokens=[320] * 8,
                first_of_group=[False] * 8,
            )
            for first in range(0, 64, 8)
        ]
        backlog.insert_cohorts(conn, rows)
    dispatcher.step()
    with database.transaction() as conn:
        moved = conn.execute(sa.select(cohort.c.id).where(cohort.c.moved, cohort.c.queue == "instance.two")).all()
    assert moved


def test_a_cohort_taken_in_the_table_finds_all_that_the_thief_ran_before(
    database: Database, dispatcher: Dispatcher
) -> None:
    groups = [1, 1, 2, 2, 2, 1, 1, 1, 3, 3]  # the thief ran 1, then 3; what it takes is the rest of 1
    jobs = seed(database, groups, "one", "two")
    with database.transaction() as conn:
        for queue, part in (("instance.two", jobs[:2]), ("instance.two", jobs[8:]), ("instance.one", jobs[2:8])):
            row = backlog.NewCohort(
                model=MODEL,
                queue=queue,
                sequence=part[0],
                priority=Priority.NORMAL,
                alone=False,
                body_bytes=80,
                estimated_seconds=1.0,
                job_ids=part,
                predicted_cached_tokens=[0] * len(part),
                first_of_group=[False] * len(part),
            )
            backlog.insert_cohorts(conn, [row])
        (slow, thief) = instances.ready_boots(conn, 600)
        for boot in (thief, thief):
            room = dispatching.Room(jobs=1, least_cohorts=1, most_cohorts=1)
            dispatching.dispatch(conn, boot_id=boot.id, queue=boot.queue, model=MODEL, room=room, interactive=False)
        conn.execute(sa.update(cohort).where(cohort.c.state == CohortState.DISPATCHED).values(state=CohortState.DONE))
        rebalance.steal(conn, [slow, thief], {thief.id})
        found = conn.execute(
            sa.select(job.c.predicted_cached_tokens)
            .join(cohort, cohort.c.id == job.c.cohort_id)
            .where(cohort.c.moved)
            .order_by(cohort.c.id, job.c.cohort_position)
        ).scalars()
        assert list(found) == [320] * 3


def test_single_jobs_go_out_at_once_beside_bulk(database: Database, dispatcher: Dispatcher) -> None:
    seed(database, [1] * 200, "one")
    dispatcher.step()
    with database.transaction() as conn:
        tenant_id = add_tenant(conn, "other")
        add_jobs(conn, tenant_id, None, [1, 2])
    assert dispatcher.step() == 2
    with database.transaction() as conn:
        urgent = conn.execute(sa.select(cohort.c.n_jobs).where(cohort.c.priority == Priority.INTERACTIVE)).scalars()
        assert list(urgent) == [1, 1]


def test_nothing_is_planned_without_an_instance_of_the_model(database: Database, dispatcher: Dispatcher) -> None:
    seed(database, [1, 2, 3])
    assert dispatcher.step() == 0
    assert planned(database) == {}


def test_a_broker_that_is_down_delays_and_loses_nothing(
    settings: Settings, database: Database, publisher: Publisher, broker_url: str
) -> None:
    seed(database, [1] * 8, "one")
    down = Publisher(make_app(settings, "redis://127.0.0.1:1/0", queue="control"))
    assert Dispatcher(settings, database, down).step() > 0
    with database.transaction() as conn:
        conn.execute(sa.update(cohort).values(dispatched_at=sa.text("now() - interval '1 minute'")))
    again = Reaper(settings, database, publisher).step()
    Dispatcher(settings, database, publisher).publish(again)
    with database.transaction() as conn:
        out = conn.execute(sa.select(sa.func.count()).where(cohort.c.state == CohortState.DISPATCHED)).scalar_one()
    assert len(again) == out == redis.Redis.from_url(broker_url).llen("instance.one")


def test_a_higher_class_comes_next_though_others_wait(database: Database, dispatcher: Dispatcher) -> None:
    seed(database, [1] * 400, "one")
    dispatcher.step()
    with database.transaction() as conn:
        tenant_id = add_tenant(conn, "other")
        add_jobs(conn, tenant_id, add_batch(conn, tenant_id, "batch_high", priority=Priority.HIGH), [3] * 8)
    finish(database, "instance.one")
    dispatcher.step()
    with database.transaction() as conn:
        out = cohort.c.state == CohortState.DISPATCHED
        classes = conn.execute(sa.select(cohort.c.priority).where(out).order_by(cohort.c.sequence)).scalars().all()
    assert classes[0] == Priority.HIGH
    assert classes[-1] == Priority.NORMAL


def test_a_single_job_goes_where_bulk_work_left_its_prefix(database: Database, dispatcher: Dispatcher) -> None:
    seed(database, [1] * 20 + [2] * 20, "one", "two")
    dispatcher.step()
    with database.transaction() as conn:
        conn.execute(sa.update(cohort).values(state=CohortState.DONE))
        home = conn.execute(
            sa.select(cohort.c.queue).join(job, job.c.cohort_id == cohort.c.id).where(job.c.line_no == 40)
        ).scalar_one()
        add_jobs(conn, add_tenant(conn, "other"), None, [2])
    dispatcher.step()
    with database.transaction() as conn:
        row = conn.execute(
            sa.select(cohort.c.queue, job.c.predicted_cached_tokens)
            .join(job, job.c.cohort_id == cohort.c.id)
            .where(job.c.batch_id.is_(None))
        ).one()
    assert (row.queue, row.predicted_cached_tokens) == (home, 320)


def test_a_single_job_that_failed_twice_runs_alone(database: Database, dispatcher: Dispatcher) -> None:
    seed(database, [], "one")
    with database.transaction() as conn:
        add_jobs(conn, add_tenant(conn, "other"), None, [1])
    dispatcher.step()
    with database.transaction() as conn:
        conn.execute(sa.update(cohort).values(state=CohortState.READY, failures=2, instance_boot_id=None))
    assert dispatcher.step() == 1
    with database.transaction() as conn:
        alone = conn.execute(sa.select(cohort.c.state).where(cohort.c.alone)).scalar_one()
    assert alone == CohortState.DISPATCHED


def test_single_jobs_spread_over_idle_instances(database: Database, dispatcher: Dispatcher) -> None:
    seed(database, [], "one", "two", "three")
    with database.transaction() as conn:
        add_jobs(conn, add_tenant(conn, "other"), None, list(range(30)))
    dispatcher.step()
    assert {len(ids) for ids in planned(database).values()} == {10}


def test_a_lower_class_waits_for_the_higher(database: Database, dispatcher: Dispatcher) -> None:
    normal = seed(database, [number // 50 for number in range(400)], "one")
    with database.transaction() as conn:
        tenant_id = add_tenant(conn, "other")
        low = add_jobs(conn, tenant_id, add_batch(conn, tenant_id, "batch_low", priority=Priority.LOW), [9] * 400)
    run_out(database, dispatcher, "instance.one")
    order = planned(database)["instance.one"]
    assert sorted(order[:400]) == normal
    assert sorted(order[400:]) == low


def test_tenants_take_turns(database: Database, dispatcher: Dispatcher) -> None:
    seed(database, [1] * 400, "one")
    with database.transaction() as conn:
        tenant_id = add_tenant(conn, "other")
        small = add_jobs(conn, tenant_id, add_batch(conn, tenant_id, "batch_small"), [2] * 40)
    run_out(database, dispatcher, "instance.one")
    order = planned(database)["instance.one"]
    assert len(order) == 440
    assert max(order.index(job_id) for job_id in small) < 200  # two seconds of the other's work come first: 140 jobs


@pytest.mark.parametrize("policy", ["round_robin", "affinity", "shared_queue"])
def test_another_policy_can_be_set(settings: Settings, database: Database, publisher: Publisher, policy: str) -> None:
    jobs = seed(database, [number % 4 for number in range(80)], "one", "two")
    dispatcher = Dispatcher(replace(settings, plan_policy=policy), database, publisher)
    run_out(database, dispatcher, "instance.one", "instance.two")
    assert sorted(job_id for ids in planned(database).values() for job_id in ids) == jobs
