"""`trunkline doctor` over real servers: what it finds wrong, what it advises, and its exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from seeds import FACTS, MODEL, add_batch, add_boot, add_jobs, add_tenant

from service.core.accounting import Counts
from service.core.alarm import ADVICE, Mismatch
from service.core.model import BatchStatus, TaskKind
from service.doctor import Diagnosis, Finding, State, diagnose
from service.errors import SettingError
from service.leader import Leader
from service.ports import free_port
from service.settings import Settings, child_environment
from service.store import backlog, instances
from service.store.control_tables import control_task
from service.store.session import Database
from service.store.tables import batch, batch_progress, instance_boot


@pytest.fixture
def sound(settings: Settings, database: Database, broker_url: str) -> Settings:
    """A host with one instance that runs, and a broker that answers."""
    settings.state_folder.mkdir(parents=True)
    settings.models_path.write_text(f"[models.{MODEL}]\n")
    settings.instances_path.write_text(f'[instances.one]\nengine = "simulated"\nmodel = "{MODEL}"\n')
    with database.transaction() as conn:
        add_boot(conn, "one")
    return replace(settings, broker_url=broker_url, stale_boot_seconds=600.0)  # however slow this machine is


def problems(found: Diagnosis) -> list[Finding]:
    return [finding for finding in found.findings if finding.state is State.PROBLEM]


def only_problem(settings: Settings, database: Database) -> Finding:
    """With a dispatcher that leads."""
    leader = Leader(database)
    assert leader.leads()
    found = diagnose(settings)
    leader.close()
    (problem,) = problems(found)
    assert problem.advice
    assert found.exit_status == 1
    return problem


def test_a_sound_service_has_no_problem(sound: Settings, database: Database) -> None:
    leader = Leader(database)
    assert leader.leads()
    found = diagnose(sound)
    leader.close()
    assert problems(found) == []
    assert found.exit_status == 0
    parts = {finding.part for finding in found.findings}
    assert parts >= {
        "versions",
        "models",
        "broker",
        "store",
        "database",
        "schema",
        "dispatcher",
        "control",
        "instances",
    }
    assert parts >= {"keys", "queues", "accounting"}


def test_no_dispatcher(sound: Settings) -> None:
    (problem,) = problems(diagnose(sound))
    assert problem.part == "dispatcher"


@pytest.mark.parametrize("alarm", Mismatch)
def test_a_key_mismatch_and_what_to_do(sound: Settings, database: Database, alarm: Mismatch) -> None:
    with database.transaction() as conn:
        instances.mark_ready(conn, add_boot(conn, "bad", ready=False), replace(FACTS, key_agrees=False, alarm=alarm))
    problem = only_problem(sound, database)
    assert problem.said == f"KEY MISMATCH on bad ({alarm})"
    assert ADVICE[alarm] in problem.advice


def test_an_instance_that_is_silent_and_one_that_does_not_run(sound: Settings, database: Database) -> None:
    with database.transaction() as conn:
        hour_ago = sa.func.now() - sa.text("interval '1 hour'")
        conn.execute(sa.update(instance_boot).values(heartbeat_at=hour_ago))
    assert "heartbeat 3600 s ago" in only_problem(sound, database).said
    with database.transaction() as conn:
        conn.execute(sa.update(instance_boot).values(state="gone"))
    assert only_problem(sound, database).said == "one: does not run"


def test_work_that_nobody_takes(sound: Settings, database: Database) -> None:
    with database.transaction() as conn:
        tenant = add_tenant(conn)
        row = backlog.NewCohort(
            model=MODEL,
            queue="instance.lost",
            sequence=1,
            priority=1,
            alone=False,
            body_bytes=1,
            estimated_seconds=1.0,
            job_ids=add_jobs(conn, tenant, add_batch(conn, tenant), [1]),
            predicted_cached_tokens=[0],
            first_of_group=[True],
        )
        backlog.insert_cohorts(conn, [row])
    assert only_problem(sound, database).said.startswith("instance.lost: 1 cohorts have no worker since ")
    with database.transaction() as conn:
        conn.execute(sa.text("update cohort set queue = 'instance.one'"))
        late = sa.func.now() - sa.text("interval '2 minutes'")
        task = {"kind": TaskKind.INTAKE, "subject": "batch_1", "state": "ready", "not_before": late}
        conn.execute(sa.insert(control_task).values(**task))
    assert only_problem(sound, database).part == "control"


def test_lines_that_do_not_add_up(sound: Settings, database: Database) -> None:
    with database.transaction() as conn:
        add_batch(conn, add_tenant(conn), total=3, status=BatchStatus.COMPLETED)
        conn.execute(sa.insert(batch_progress).values(batch_id="batch_1", completed=2))
    problem = only_problem(sound, database)
    assert problem.part == "accounting"
    assert "2 lines ended of 3" in problem.said
    with database.transaction() as conn:
        conn.execute(sa.update(batch).values(total=2))
    assert problems(diagnose(sound))[0].part == "dispatcher"
    assert Counts(completed=2).errors == 0


def test_a_file_that_is_wrong_is_a_finding_among_others(sound: Settings, database: Database) -> None:
    sound.instances_path.write_text("[instances.one]\n")
    problem = only_problem(sound, database)
    assert problem.part == "instances file"
    assert "INSTANCES" in problem.said


def test_servers_that_are_away(sound: Settings, empty_database_url: str) -> None:
    gone = diagnose(replace(sound, broker_url=f"redis://127.0.0.1:{free_port()}/0"))
    assert [finding.part for finding in problems(gone)] == ["broker", "dispatcher"]
    for url, part in ((f"postgresql://no@127.0.0.1:{free_port()}/no", "database"), (empty_database_url, "schema")):
        blind = diagnose(replace(sound, database_url=url))
        assert blind.exit_status == 2
        assert problems(blind)[-1].part == part
    with pytest.raises(SettingError):
        diagnose(replace(sound, database_url=None))


def test_the_command(sound: Settings, tmp_path: Path) -> None:
    def run(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "trunkline", "doctor", *arguments]
        environment = {**child_environment(sound), "COLUMNS": "80", **changes}
        return subprocess.run(
            argv, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )

    lines = run()
    assert lines.returncode == 1, lines.stderr
    assert "PROBLEM" in lines.stdout
    assert "dispatcher: Start one" in lines.stdout
    record = json.loads(run("--json").stdout)
    assert record["status"] == "findings"
    assert {finding["state"] for finding in record["findings"]} == {"fine", "problem"}
    blind = run("--json", DATABASE_URL="postgresql://127.0.0.1:9/none")
    assert (blind.returncode, json.loads(blind.stdout)["status"]) == (2, "cannot_look")
    refused = run(TRUNKLINE_LEASE_SECONDS="no")
    assert (refused.returncode, refused.stdout) == (2, "")
