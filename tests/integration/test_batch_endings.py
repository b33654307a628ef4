"""Every terminal status keeps the invariant of CONTRACT section 3, and `trunkline doctor` sees where one does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from accounting_checks import check_output_files
from api_fixtures import Api, api  # noqa: F401 - a fixture
from control_fixtures import Desk, jsonl, request
from test_settle import CancellingTokenizing, expire

from service import intake
from service.control import run_task
from service.core.accounting import AccountingBroken
from service.core.model import LineErrorCode, Outcome
from service.doctor import Finding, State, diagnose
from service.store.tables import batch as batch_table
from service.store.tables import batch_progress, file, job_result

SOURCE = b"\xef\xbb\xbf\n" + jsonl(request(f"c{n}\u2028") for n in range(6)).replace(b"\n", b"\r\n") + b'{"custom_id":'
SOUND = jsonl(request(f"c{n}") for n in range(6))


@pytest.fixture
def desk(api: Api) -> Desk:
    return api.desk()


def names(desk: Desk, batch_id: str) -> list[str]:
    return [row.custom_id for row in desk.jobs(batch_id)]


def completed(desk: Desk) -> tuple[str, bytes]:
    """Answered, refused, crashed and skipped lines."""
    batch_id = desk.take_in(SOURCE, on_invalid_line="skip")
    desk.answer(batch_id, names(desk, batch_id)[:3])
    desk.answer(batch_id, names(desk, batch_id)[3:5], status_code=422)
    desk.end(batch_id, Outcome.FAILED, LineErrorCode.ENGINE_CRASH)
    (task_id,) = desk.finalize()
    run_task(desk.work, task_id)
    return batch_id, SOURCE


def cancelled(desk: Desk) -> tuple[str, bytes]:
    batch_id = desk.take_in(SOURCE, on_invalid_line="skip")
    desk.answer(batch_id, names(desk, batch_id)[:2])
    run_task(desk.work, desk.cancel(batch_id))
    return batch_id, SOURCE


def cancelled_at_intake(desk: Desk) -> tuple[str, bytes]:
    """Some lines are jobs, the others never became any."""
    batch_id, task_id = desk.create(SOUND)
    cancelling = CancellingTokenizing(desk, batch_id)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intake, "CHUNK_LINES", 2)
        run_task(replace(desk.work, tokenizing=cancelling), task_id)
    assert len(desk.jobs(batch_id)) == 2
    run_task(desk.work, cancelling.task_id)
    return batch_id, SOUND


def expired(desk: Desk) -> tuple[str, bytes]:
    batch_id = desk.take_in(SOUND)
    desk.answer(batch_id, names(desk, batch_id)[:1])
    desk.answer(batch_id, names(desk, batch_id)[1:2], status_code=500)
    run_task(desk.work, expire(desk, batch_id))
    return batch_id, SOUND


ENDINGS = {
    "completed": completed,
    "cancelled": cancelled,
    "cancelled at intake": cancelled_at_intake,
    "expired": expired,
}


def files_of(api: Api, batch: dict[str, Any]) -> tuple[bytes, bytes]:
    sdk = api.sdk()
    found = [batch[name] and sdk.files.content(batch[name]).content for name in ("output_file_id", "error_file_id")]
    return found[0] or b"", found[1] or b""


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_line_is_in_exactly_one_file(api: Api, desk: Desk, ending: str) -> None:
    batch_id, source = ENDINGS[ending](desk)
    found = api.http.get(f"/v1/batches/{batch_id}").json()
    assert found["status"] == ending.split()[0]
    output, error = files_of(api, found)
    check_output_files(found, source=source, output=output, error=error)


def moved_line(output: bytes, error: bytes) -> tuple[bytes, bytes]:
    first, rest = output.split(b"\n", 1)
    return rest, error + first + b"\n"


def doubled_line(output: bytes, error: bytes) -> tuple[bytes, bytes]:
    lines = output.splitlines(keepends=True)
    return b"".join([lines[0], *lines[:-1]]), error


def lost_line(output: bytes, error: bytes) -> tuple[bytes, bytes]:
    return output, error.split(b"\n", 1)[1]


def another_end(output: bytes, error: bytes) -> tuple[bytes, bytes]:
    return output, error.replace(b"engine_crash", b"batch_cancelled")


@pytest.mark.parametrize("harm", [moved_line, doubled_line, lost_line, another_end])
def test_the_check_sees_what_is_wrong(
    api: Api, desk: Desk, harm: Callable[[bytes, bytes], tuple[bytes, bytes]]
) -> None:
    batch_id, source = completed(desk)
    found = api.http.get(f"/v1/batches/{batch_id}").json()
    output, error = harm(*files_of(api, found))
    with pytest.raises((AssertionError, AccountingBroken)):
        check_output_files(found, source=source, output=output, error=error)


def accounting(api: Api, **options: Any) -> list[Finding]:
    return [finding for finding in diagnose(api.settings, **options).findings if finding.part == "accounting"]


def test_doctor_reads_the_files_of_ended_batches(api: Api, desk: Desk) -> None:
    ended = [make(desk)[0] for make in ENDINGS.values()]
    (fine,) = accounting(api)
    assert fine.state is State.FINE
    assert fine.said == "every line of 4 ended batches ended once; the files of 4 were read and say the same"

    path = Path(api.settings.store_location) / f"output/{ended[0]}/output.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole.split(b"\n", 1)[1])
    (short,) = accounting(api)
    assert short.state is State.PROBLEM
    assert ended[0] in short.said
    assert "completed=2" in short.said
    path.unlink()
    (lost,) = accounting(api)
    assert (lost.state, "STORE_URL" in lost.advice) == (State.PROBLEM, True)
    path.write_bytes(whole)
    errors = path.with_name("error.jsonl")
    errors.write_bytes(errors.read_bytes().replace(b"{", b"[", 1))
    assert "no result line" in accounting(api)[0].said

    # A tenant may delete what it has read.
    with api.database.transaction() as conn:
        conn.execute(sa.delete(file).where(file.c.store_path == f"output/{ended[0]}/output.jsonl"))
    (fine,) = accounting(api)
    assert fine.said.endswith("the files of 3 were read and say the same")


def test_doctor_looks_at_the_newest_unless_all_are_asked_for(
    api: Api, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        expired(desk)
    monkeypatch.setattr("service.doctor._CHECKED_BATCHES", 2)
    monkeypatch.setattr("service.doctor._CHECKED_FILES", 1)
    assert "2 ended batches ended once; the files of 1 were" in accounting(api)[0].said
    assert "3 ended batches ended once; the files of 3 were" in accounting(api, is_all=True)[0].said


def test_export_never_ends_a_batch_whose_counts_do_not_add_up(api: Api, desk: Desk) -> None:
    batch_id = desk.take_in(SOUND)
    desk.answer(batch_id, names(desk, batch_id))
    with api.database.transaction() as conn:  # a row that no counter knows of
        lost = sa.select(sa.func.max(job_result.c.job_id)).scalar_subquery()
        conn.execute(sa.delete(job_result).where(job_result.c.job_id == lost))
        assert conn.execute(sa.update(batch_progress).values(lines_unknown=0)).rowcount
    (task_id,) = desk.finalize()
    run_task(desk.work, task_id)
    assert desk.batch(batch_id).status == "finalizing"
    assert "AccountingBroken" in json.dumps(desk.task(task_id)._asdict(), default=str)
    with api.database.transaction() as conn:
        assert conn.scalar(sa.select(batch_table.c.output_file_id)) is None
