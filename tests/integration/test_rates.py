"""Rates, corrections and output lengths over real rows: read in bounded size, written, lent, inherited, shown."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from rich.console import Console
from seeds import MODEL, add_batch, add_boot, add_jobs, add_tenant, key_of

from service import cli_fit
from service.core.fit import fit
from service.core.ledger import Ledger
from service.core.model import BootState, Outcome
from service.core.simulate import CostModel
from service.corrections import CorrectionFeed
from service.planfile import read_cost
from service.rate_keeper import RateKeeper
from service.settings import Settings, child_environment
from service.store import instances, output_lengths, rates
from service.store.instances import Boot
from service.store.session import Database
from service.store.tables import instance_boot, job, job_result

COST = CostModel(
    step_seconds=0.01, prefill_token_seconds=2e-4, decode_sequence_seconds=1e-4, context_token_seconds=1e-7
)
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(slots=True)
class Engine:
    """Writes results of a boot whose engine runs one job after the other, at known constants."""

    conn: sa.Connection
    boot_id: int
    cost: CostModel = COST
    seconds: float = 0.0
    next_id: int = 1

    def finish(self, n: int, **values: Any) -> None:
        rows = []
        for _ in range(n):
            number = self.next_id
            prompt, cached, made = 400 + 137 * number % 1500, 320 * (number % 2), 1 + 31 * number % 200
            took = self.cost.seconds(prefill_tokens=prompt - cached, decoding=0, context_tokens=0) + self.cost.seconds(
                prefill_tokens=0, decoding=1, context_tokens=(made - 1) * (prompt + made // 2), steps=made - 1
            )
            row = {
                "job_id": self.boot_id * 1_000_000 + number,
                "instance_boot_id": self.boot_id,
                "outcome": Outcome.SUCCEEDED,
                "prompt_tokens": prompt,
                "cached_tokens": cached,
                "completion_tokens": made,
                "run_ms": round(took * 1000),
                "started_at": BEGAN + timedelta(seconds=self.seconds),
            }
            rows.append(row | values)
            self.seconds += round(took, 3) + (5.0 if number % 20 == 0 else 0.0)
            self.next_id += 1
        self.conn.execute(sa.insert(job_result), rows)


def boots_of(database: Database) -> list[Boot]:
    with database.transaction() as conn:
        return instances.list_boots(conn)


def test_the_newest_results_of_a_boot_are_read_and_fitted(database: Database) -> None:
    with database.transaction() as conn:
        one, other = add_boot(conn, "one"), add_boot(conn, "other", pid=2)
        Engine(conn, one).finish(300)
        Engine(conn, other, cost=replace(COST, step_seconds=9.0)).finish(10)
    with database.transaction() as conn:
        conn.execute(sa.insert(job_result).values(job_id=7, instance_boot_id=one, outcome=Outcome.CANCELLED))
        run = rates.read_run(conn, one, max_num_seqs=16, jobs_in_flight=0, limit=1_000)
        newest = rates.read_run(conn, one, max_num_seqs=None, jobs_in_flight=3, limit=100)
        assert [rates.results_after(conn, one, 0, limit) for limit in (50, 1_000)] == [50, 301]
        assert rates.results_after(conn, one, rates.recorded_up_to(conn, one), 10) == 0
        assert rates.recorded_up_to(conn, 99) == 0
    assert (len(run), run.is_cut, run.is_open) == (300, False, False)
    assert (len(newest), newest.is_cut, newest.is_open) == (99, True, True)
    assert newest.started_seconds.min() > sorted(run.started_seconds)[200]
    found = fit([run])
    assert found is not None
    assert found.cost.step_seconds + found.cost.decode_sequence_seconds == pytest.approx(0.0101, rel=0.02)
    assert found.rates.prefill_tokens_per_second == pytest.approx(5_000, rel=0.05)
    assert found.busy_seconds == pytest.approx((run.ended_seconds - run.started_seconds).sum(), rel=0.001)


def test_the_results_of_a_boot_are_found_by_their_index(database: Database) -> None:
    """However many results there are, a look at them reads a few pages, and one that finds nothing less."""
    with database.transaction() as conn:
        one = add_boot(conn, "one")
        for boot_id in (one, 77):
            Engine(conn, boot_id).finish(5_000)
        conn.execute(sa.text("analyze job_result"))
        seen: list[str] = []

        def explain(_: Any, cursor: Any, statement: str, parameters: Any, *rest: Any) -> None:
            if statement.startswith("SELECT"):
                plan = cursor.connection.execute(f"explain {statement}", parameters)
                seen.extend(line for (line,) in plan.fetchall())

        sa.event.listen(conn, "before_cursor_execute", explain)
        feed = CorrectionFeed()
        for _ in range(2):
            assert feed.next(conn, [one, 77]) == []
        rates.results_after(conn, one, 5, 100)
        rates.recorded_up_to(conn, one)
        rates.read_run(conn, one, max_num_seqs=1, jobs_in_flight=0, limit=100)
    scans = [line for line in seen if "Scan" in line and "job_result" in line]
    assert any("ix_job_result_short" in line for line in scans)
    assert sum("ix_job_result_boot_recorded" in line for line in scans) == 3
    assert not [line for line in scans if "Seq Scan" in line]


def test_the_keeper_writes_what_differs_and_lends_to_the_others(database: Database) -> None:
    keeper = RateKeeper()
    with database.transaction() as conn:
        one = add_boot(conn, "one")
        two = add_boot(conn, "two", pid=2)
        engine = Engine(conn, one)
        engine.finish(30)
    assert keeper.refit_due(database, boots_of(database), 0.0) == []  # too few
    assert keeper.refit_due(database, boots_of(database), 1.0) == []  # of `two`: none
    with database.transaction() as conn:
        engine.conn = conn
        engine.finish(200)
    assert keeper.refit_due(database, boots_of(database), 2.0) == []  # not due
    written = keeper.refit_due(database, boots_of(database), 11.0)
    assert {item.boot_id for item in written} == {one, two}
    first, second = boots_of(database)
    assert first.prefill_tokens_per_second == pytest.approx(5_000, rel=0.05)
    assert second.prefill_tokens_per_second == first.prefill_tokens_per_second
    assert second.decode_tokens_per_second == first.decode_tokens_per_second == pytest.approx(98, rel=0.05)
    with database.transaction() as conn:
        engine.conn = conn
        engine.finish(200)
    assert [keeper.refit_due(database, boots_of(database), at) for at in (30.0, 31.0)] == [[], []]  # the same again
    with database.transaction() as conn:
        Engine(conn, two, cost=replace(COST, prefill_token_seconds=4e-4)).finish(200)
    later = [item for at in (50.0, 51.0) for item in keeper.refit_due(database, boots_of(database), at)]
    assert [item.boot_id for item in later] == [two]
    assert later[0].rates.prefill_tokens_per_second == pytest.approx(2_500, rel=0.1)
    assert keeper.refit_due(database, [], 99.0) == []


def test_a_new_boot_inherits_what_its_predecessor_was_rated(database: Database) -> None:
    with database.transaction() as conn:
        instances.set_rates(conn, add_boot(conn, "one"), 123.0, 45.0)
        add_boot(conn, "one")
        add_boot(conn, "two", pid=2)
        one, two = instances.list_boots(conn)
        assert (one.prefill_tokens_per_second, one.decode_tokens_per_second) == (123.0, 45.0)
        assert (two.prefill_tokens_per_second, two.decode_tokens_per_second) == (None, None)
        for column, value in (("engine_arguments", ["--max-num-seqs", "4"]), ("model", "x"), ("devices", [3])):
            conn.execute(sa.update(instance_boot).values(state=BootState.GONE, **{column: value}))
            add_boot(conn, "one")
            (one,) = instances.list_boots(conn)
            assert one.prefill_tokens_per_second is None, column
            instances.set_rates(conn, one.id, 123.0, 45.0)


def add_short(conn: sa.Connection, ids: Sequence[int], boot_id: int, cached: int | None, predicted: int = 320) -> None:
    rows = [
        {
            "job_id": job_id,
            "instance_boot_id": boot_id,
            "outcome": Outcome.SUCCEEDED,
            "prompt_tokens": 384,
            "cached_tokens": cached,
            "predicted_cached_tokens": predicted,
        }
        for job_id in ids
    ]
    conn.execute(sa.insert(job_result), rows)


def test_results_that_fell_short_correct_the_ledger_once(database: Database) -> None:
    feed, ledger = CorrectionFeed(), Ledger()
    with database.transaction() as conn:
        ids = add_jobs(conn, add_tenant(conn), None, [1, 1, 2, 2, 3, 3, 4])
        one, two = add_boot(conn, "one"), add_boot(conn, "two", pid=2)
        add_short(conn, ids[:1], one, 0)  # before the ledger was there
    with database.transaction() as conn:
        assert feed.next(conn, [one, two]) == []
    ledger.open(one, 100_000)
    for group, line in ((1, 1), (1, 2), (2, 3)):
        ledger.record(one, *key_of(group, line))
    with database.transaction() as conn:
        add_short(conn, ids[1:2], one, 96)
        add_short(conn, ids[2:3], one, 320)  # as predicted
        add_short(conn, ids[3:4], one, None)  # unknown is not short
        add_short(conn, ids[4:6], two, 0)
        add_short(conn, ids[6:], 99, 0)
    with database.transaction() as conn:
        found = feed.next(conn, [one, two])
        assert feed.next(conn, [one, two]) == []
    key, prompt_tokens = key_of(1, 2)
    assert [(item.boot_id, item.measured_cached_tokens) for item in found] == [(one, 96), (two, 0), (two, 0)]
    assert (found[0].key, found[0].prompt_tokens) == (key, prompt_tokens)
    for item in found:
        ledger.correct(item.boot_id, item.key, item.measured_cached_tokens, item.prompt_tokens)
    assert ledger.predict(one, key, prompt_tokens, 32) == 352  # its own prompt is there now
    assert ledger.predict(one, *key_of(1, 1), 32) == 320  # without what the eviction took beyond the shared part
    assert ledger.predict(one, *key_of(2, 3), 32) == 352
    with database.transaction() as conn:
        assert feed.next(conn, []) == []
        assert feed.next(conn, [one]) == []  # forgotten meanwhile: begins with what comes now


def test_corrections_come_in_bounded_parts(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.corrections._PER_PASS", 2)
    feed = CorrectionFeed()
    with database.transaction() as conn:
        ids = add_jobs(conn, add_tenant(conn), None, [1] * 5)
        one = add_boot(conn, "one")
    with database.transaction() as conn:
        feed.next(conn, [one])
    with database.transaction() as conn:
        add_short(conn, ids, one, 0)
    with database.transaction() as conn:
        assert [len(feed.next(conn, [one])) for _ in range(4)] == [2, 2, 1, 0]


def test_output_lengths_are_scaled_by_the_batch(database: Database) -> None:
    with database.transaction() as conn:
        tenant_id = add_tenant(conn)
        for number, made in enumerate((2, 32)):
            ids = add_jobs(conn, tenant_id, add_batch(conn, tenant_id, f"batch_{number}"), [1] * 300)
            rows = [
                {
                    "job_id": job_id,
                    "batch_id": f"batch_{number}",
                    "outcome": Outcome.SUCCEEDED if place < 200 else Outcome.FAILED,
                    "completion_tokens": made if place < 200 else None,
                }
                for place, job_id in enumerate(ids[:220])
            ]
            conn.execute(sa.insert(job_result), rows)
        conn.execute(sa.update(job).where(job.c.id.in_(ids[:10])).values(predicted_output_tokens=8))
        scales = output_lengths.output_scale(conn, ["batch_0", "batch_1", "batch_none"])
        assert output_lengths.output_scale(conn, []) == {}
    assert scales["batch_0"] == pytest.approx((200 * 2 + 20 * 8) / (220 * 8))
    assert scales["batch_1"] == pytest.approx((200 * 32 + 20 * 8) / (220 * 8))
    assert scales["batch_none"] == 1.0


def test_the_report_fits_each_instance_and_the_fleet(database: Database, tmp_path: Path) -> None:
    with database.transaction() as conn:
        former = add_boot(conn, "one")
        Engine(conn, former).finish(100)
        Engine(conn, add_boot(conn, "one")).finish(100)
        Engine(conn, add_boot(conn, "two", pid=2), cost=replace(COST, step_seconds=0.03)).finish(200)
        Engine(conn, add_boot(conn, "three", pid=3)).finish(5)
        add_boot(conn, "idle", pid=4)
        conn.execute(sa.update(instance_boot).where(instance_boot.c.name == "two").values(engine="vllm"))
        report = cli_fit.read_fit(conn)
    one, three, two = report.instances
    assert [item.name for item in report.instances] == ["one", "three", "two"]
    assert (len(one.boots), one.results, three.found) == (2, 200, None)
    record = json.loads(json.dumps(cli_fit.as_json_object(report)))
    assert [row["cost"] is None for row in record["instances"]] == [False, True, False]
    assert (record["jobs"], record["simulated"], two.is_simulated) == (405, True, False)
    assert record["instances"][2]["prefill_tokens_per_second"] == pytest.approx(5_000, rel=0.1)
    (tmp_path / "cost.json").write_text(json.dumps(record))
    assert read_cost(tmp_path / "cost.json") == CostModel(**record["cost"])
    console = Console(width=80, record=True, file=io.StringIO())
    for table in cli_fit.tables(report):
        console.print(table)
    text = console.export_text()
    assert "too few" in text
    assert "(all)" in text
    assert any("Simulated, computed by no model: one, three." in note for note in cli_fit.notes(report))


def test_the_command_prints_one_object_or_one_sentence(settings: Settings, database: Database, tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "trunkline", "stats", "--fit", *arguments]
        environment = {**child_environment(settings), "COLUMNS": "80"}
        return subprocess.run(
            argv, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )

    nothing = run("--json")
    assert (nothing.returncode, nothing.stdout) == (1, "")
    assert "nothing to fit" in nothing.stderr
    assert nothing.stderr.count("\n") == 1
    with database.transaction() as conn:
        Engine(conn, add_boot(conn, "one")).finish(100)
    record = json.loads(run("--json").stdout)
    assert record["cost"]["prefill_token_seconds"] == pytest.approx(2e-4, rel=0.1)
    tables = run()
    assert tables.returncode == 0, tables.stderr
    assert "prefill tok/s" in tables.stdout
    assert max(map(len, tables.stdout.splitlines())) <= 80
    assert MODEL not in tables.stderr
