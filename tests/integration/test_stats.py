"""Statistics over real rows: known and unknown cached tokens apart, the planner's groups, loud mismatches."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from rich.console import Console
from seeds import FACTS, MODEL, add_batch, add_boot, add_jobs, add_tenant

from service import cli_stats
from service.core.alarm import Mismatch
from service.core.model import BatchStatus, MissCause, Outcome
from service.errors import NoSuchBatch
from service.settings import Settings, child_environment
from service.store import instances, stats
from service.store.session import Database
from service.store.tables import batch, instance_boot, job_result, line_error

PROMPT = 384  # tokens of each prompt of `add_jobs`: 320 shared by its group and 64 of its own
GROUPS = [1, 2, 1, 2, 1, 3]


def add_result(conn: sa.Connection, job_id: int, boot_id: int | None, cached: int | None, **values: Any) -> None:
    row: dict[str, Any] = {
        "job_id": job_id,
        "batch_id": "batch_1",
        "instance_boot_id": boot_id,
        "outcome": Outcome.SUCCEEDED,
        "prompt_tokens": PROMPT,
        "cached_tokens": cached,
        "predicted_cached_tokens": 320,
        "completion_tokens": 8,
    }
    conn.execute(sa.insert(job_result).values(**{**row, **values}))


@pytest.fixture
def jobs(database: Database) -> list[int]:
    """Six jobs in three groups, five ended: two on `one`, two on `two`, one cancelled."""
    with database.transaction() as conn:
        tenant_id = add_tenant(conn)
        add_batch(conn, tenant_id, bound_tokens=960, prefix_groups=3)
        ids = add_jobs(conn, tenant_id, "batch_1", GROUPS)
        one, two = add_boot(conn, "one"), add_boot(conn, "two", pid=2)
        first = {"predicted_cached_tokens": 0, "miss_cause": MissCause.FIRST_OF_GROUP}
        add_result(conn, ids[0], one, 0, **first)
        add_result(conn, ids[2], one, 320)
        add_result(conn, ids[1], two, 96, miss_cause=MissCause.EVICTED)
        add_result(conn, ids[3], two, None, miss_cause=MissCause.UNKNOWN)
        add_result(conn, ids[4], None, None, outcome=Outcome.CANCELLED, prompt_tokens=None)
        conn.execute(sa.update(instance_boot).where(instance_boot.c.id == two).values(engine="vllm"))
    return ids


def test_instances_are_summed_over_known_rows(database: Database, jobs: list[int]) -> None:
    with database.transaction() as conn:
        one, two = stats.instance_stats(conn, "batch_1")
        assert stats.instance_stats(conn, "another") == []
    assert (one.name, one.is_simulated, two.name, two.is_simulated) == ("one", True, "two", False)
    assert (one.tokens.jobs, one.tokens.unknown_jobs, one.tokens.cached_tokens) == (2, 0, 320)
    assert one.tokens.hit_rate == 320 / (2 * PROMPT)
    assert (two.tokens.jobs, two.tokens.unknown_jobs, two.tokens.prompt_tokens) == (2, 1, PROMPT)
    assert (two.tokens.hit_rate, two.tokens.predicted_cached_tokens) == (96 / PROMPT, 320)


def test_an_instance_keeps_its_boots_together_and_shows_without_results(database: Database, jobs: list[int]) -> None:
    with database.transaction() as conn:
        boot = next(item.id for item in instances.list_boots(conn) if item.name == "one")
        instances.mark_gone(conn, boot, "test")
        add_result(conn, jobs[5], add_boot(conn, "one", pid=3), 64)
        add_boot(conn, "idle", pid=4)
        found = {item.name: item for item in stats.instance_stats(conn)}
    assert (found["one"].boots, found["one"].tokens.jobs, found["one"].tokens.cached_tokens) == (2, 3, 384)
    assert (found["idle"].boots, found["idle"].tokens, found["idle"].tokens.hit_rate) == (1, stats.TokenSums(), None)


def test_groups_are_those_of_the_keys(database: Database, jobs: list[int]) -> None:
    with database.transaction() as conn:
        groups = sorted(stats.group_stats(conn, "batch_1"), key=lambda group: (-group.jobs, group.tokens.cached_tokens))
        assert stats.group_stats(conn, "another") == []
    three, *rest = groups
    assert [group.jobs for group in groups] == [3, 2, 1]
    assert [group.shared_tokens for group in groups] == [320, 320, 0]
    assert len({group.label for group in groups}) == 3
    assert (three.tokens.jobs, three.tokens.unknown_jobs, three.tokens.cached_tokens) == (3, 0, 320)
    assert (rest[0].tokens.jobs, rest[0].tokens.unknown_jobs, rest[0].tokens.hit_rate) == (2, 1, 96 / PROMPT)
    assert rest[1].tokens == stats.TokenSums()


def test_a_batch_says_outcomes_bound_and_what_is_open(database: Database, jobs: list[int]) -> None:
    with database.transaction() as conn:
        conn.execute(sa.insert(line_error).values(batch_id="batch_1", line_no=9, code="invalid_json_line", message="x"))
        conn.execute(sa.update(batch).values(total=7))
        found = stats.batch_stats(conn, "batch_1")
        assert stats.batch_stats(conn, "another") is None
        assert stats.recent_batches(conn) == ["batch_1"]
    assert found is not None
    assert (found.status, found.models) == (BatchStatus.IN_PROGRESS, (MODEL,))
    assert (found.succeeded, found.failed, found.skipped, found.cancelled, found.expired) == (4, 0, 1, 1, 0)
    assert found.unfinished == 1
    assert (found.tokens.jobs, found.tokens.unknown_jobs) == (5, 1)
    assert found.tokens.hit_rate == 416 / (3 * PROMPT)
    assert found.bound_rate == 960 / (6 * PROMPT)
    assert (found.simulated_jobs, found.key_mismatch) == (2, False)


def test_misses_are_ordered_by_what_they_cost(database: Database, jobs: list[int]) -> None:
    with database.transaction() as conn:
        found = stats.miss_stats(conn, "batch_1")
        assert stats.miss_stats(conn) == found
    assert [(miss.cause, miss.jobs, miss.computed_tokens, miss.short_tokens) for miss in found] == [
        (MissCause.FIRST_OF_GROUP, 1, 384, 0),
        (MissCause.EVICTED, 1, 288, 224),
        (MissCause.UNKNOWN, 1, 0, 0),
    ]


def test_the_sums_by_cause_are_parts_of_the_whole(database: Database, settings: Settings, jobs: list[int]) -> None:
    with database.transaction() as conn:
        add_result(conn, jobs[5], None, 300, miss_cause=MissCause.UNKNOWN)
        report = cli_stats.read_report(conn, settings, "batch_1", misses=True)
        quiet = cli_stats.read_report(conn, settings, "batch_1", misses=False)
    assert report.miss_totals is not None
    whole = report.miss_totals
    assert (whole.jobs, whole.prompt_tokens, whole.computed_tokens, whole.short_tokens) == (5, 4 * PROMPT, 820, 244)
    said = cli_stats.as_json_object(report)["miss_totals"]
    assert said["explained_share"] == pytest.approx(224 / 244)
    assert cli_stats.as_json_object(quiet)["miss_totals"] is None
    lines = shown(report).partition("Misses by cause")[2].splitlines()
    rows = {line.split("  ")[0].strip(): [cell for cell in line.split("  ") if cell.strip()][1:] for line in lines}
    assert [cell.strip() for cell in rows["(no miss)"]] == ["1", "384", "64", "0"]
    assert [cell.strip() for cell in rows["all"]] == ["5", "1,536", "820", "244"]


def test_the_misses_fit_eighty_columns(database: Database, jobs: list[int]) -> None:
    many = 10**11
    row = stats.MissStats(
        cause=MissCause.FIRST_OF_GROUP, jobs=10**7, prompt_tokens=many, computed_tokens=many, short_tokens=many
    )
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(cli_stats.miss_table([row], replace(row, cause=None)))
    text = console.export_text()
    assert text.count("100,000,000,000") == 6
    assert max(len(line) for line in text.splitlines()) <= 80


def shown(report: cli_stats.Report) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    for table in cli_stats.tables(report):
        console.print(table)
    return console.export_text()


def test_the_report_says_what_not_to_trust(database: Database, settings: Settings, jobs: list[int]) -> None:
    settings.state_folder.mkdir()
    settings.models_path.write_text(f"[models.{MODEL}]\n")
    with database.transaction() as conn:
        bad = add_boot(conn, "bad", pid=9, ready=False)
        instances.mark_ready(conn, bad, replace(FACTS, key_agrees=False, alarm=Mismatch.BLOCK_SIZE))
        add_result(conn, jobs[5], bad, 0)
        report = cli_stats.read_report(conn, settings, "batch_1", misses=True)
        with pytest.raises(NoSuchBatch):
            cli_stats.read_report(conn, settings, "batch_none", misses=False)
        every = cli_stats.read_report(conn, settings, None, misses=False)
    text, notes = shown(report), " ".join(cli_stats.notes(report))
    assert "KEY MISMATCH" in text
    assert "KEY MISMATCH on bad: its cache works in other blocks" in notes
    assert "Simulated, computed by no model: bad, one." in notes
    assert f"No tokenizer for {MODEL}" in notes
    assert "1 answered jobs do not say" in notes
    assert "simulated" in text
    assert "evicted" in text
    assert "(alone)" in text
    assert "batch_1" in shown(every)
    record = json.loads(json.dumps(cli_stats.as_json_object(report)))
    assert record["batches"][0]["bound_rate"] == 960 / (6 * PROMPT)
    assert [row["name"] for row in record["instances"]] == ["bad", "one", "two"]
    assert record["instances"][2]["hit_rate"] == 96 / PROMPT
    assert record["byte_key_models"] == [MODEL]


def test_the_command_prints_tables_json_and_one_sentence(
    settings: Settings, database: Database, empty_database_url: str, jobs: list[int], tmp_path: Path
) -> None:
    def run(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "trunkline", "stats", *arguments]
        environment = {**child_environment(settings), "COLUMNS": "160", **changes}
        return subprocess.run(
            argv, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )

    tables = run("--batch", "batch_1", "--misses")
    assert tables.returncode == 0, tables.stderr
    assert "Prefix groups" in tables.stdout
    assert "Misses by cause" in tables.stdout
    assert "Simulated, computed by no model: one." in tables.stderr
    record = json.loads(run("--json").stdout)
    assert [row["batch_id"] for row in record["batches"]] == ["batch_1"]
    for refused, said in (
        (run("--batch", "batch_none"), "There is no batch of this id. batch_none"),
        (run(DATABASE_URL=empty_database_url), "migrate"),
        (run(DATABASE_URL="postgresql://127.0.0.1:9/none"), "DATABASE_URL"),
    ):
        assert (refused.returncode, refused.stdout) == (1, "")
        assert said in refused.stderr
        assert refused.stderr.count("\n") == 1
