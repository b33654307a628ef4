"""Result files in the order of the input, and how much memory their writing takes."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
import sqlalchemy as sa
from accounting_checks import check_output_files
from api_fixtures import Api, steady  # noqa: F401 - a fixture
from client_steps import run_open_tasks
from control_fixtures import Desk, jsonl, request

from service.store.batches import Progress, add_progress

pytestmark = pytest.mark.embedded_only

# Results as workers would have written them, the last line first, and every seventh a failure.
ANSWER_ALL = """
insert into job_result (job_id, batch_id, outcome, status_code, response)
select id, batch_id, case when line_no % 7 = 0 then 'failed' else 'succeeded' end,
       case when line_no % 7 = 0 then 400 else 200 end,
       convert_to('{"n": ' || line_no || ', "text": "' || repeat('x', :size) || '"}', 'UTF8')
from job where batch_id = :id order by line_no desc
"""


def answered_backwards(api: Api, desk: Desk, lines: int, size: int, **queue: str) -> str:
    rows = jsonl(request(f"c{n}") for n in range(lines))
    batch_id = str(api.create(api.upload(rows), queue=queue)["id"])
    run_open_tasks(desk)
    with api.database.transaction() as conn:
        conn.execute(sa.text(ANSWER_ALL), {"id": batch_id, "size": size})
        failed = lines // 7
        add_progress(conn, batch_id, Progress(completed=lines - failed, failed=failed, lines_unknown=lines))
    return batch_id


def numbers(content: bytes) -> list[int]:
    return [int(json.loads(line)["custom_id"][1:]) for line in content.splitlines()]


def contents(api: Api, shown: dict[str, Any]) -> list[bytes]:
    """Of the input, output and error file of a batch."""
    ids = [shown[f"{name}_file_id"] for name in ("input", "output", "error")]
    return [api.http.get(f"/v1/files/{file_id}/content").content for file_id in ids]


@pytest.fixture
def desk(steady: Api) -> Desk:
    return steady.desk()


@pytest.mark.parametrize(("lines", "size"), [(3_000, 12_000), (70, 500_000)], ids=["many", "large"])
def test_files_in_the_order_of_the_input_are_written_in_little_memory(
    steady: Api, desk: Desk, lines: int, size: int
) -> None:
    batch_id = answered_backwards(steady, desk, lines, size, order="input")
    desk.finalize()
    tracemalloc.start()
    try:
        run_open_tasks(desk)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    ended = steady.http.get(f"/v1/batches/{batch_id}").json()
    assert ended["status"] == "completed"
    source, output, error = contents(steady, ended)
    check_output_files(ended, source=source, output=output, error=error)
    for data in (output, error):
        assert numbers(data) == sorted(numbers(data))
    assert len(output) > 30_000_000
    assert peak_bytes < 24 * 2**20, f"{peak_bytes:,} bytes at the peak"


def test_skipped_lines_stand_in_the_error_file_where_they_were(steady: Api, desk: Desk) -> None:
    rows = [jsonl([request(f"c{n}")]) if n % 3 else b'{"custom_id": "c%d"}\n' % n for n in range(9)]
    batch_id = str(
        steady.create(steady.upload(b"\n".join(rows)), queue={"order": "input", "on_invalid_line": "skip"})["id"]
    )
    run_open_tasks(desk)
    shown = steady.http.get(f"/v1/batches/{batch_id}").json()
    assert (shown["status"], shown["errors"], shown["request_counts"]["total"]) == ("in_progress", None, 9)
    assert (shown["request_counts"]["failed"], shown["queue"]["skipped"]) == (3, 3)
    desk.answer(batch_id, ["c8", "c5", "c4", "c1"])
    desk.answer(batch_id, ["c7", "c2"], status_code=400)
    desk.finalize()
    run_open_tasks(desk)
    ended = steady.http.get(f"/v1/batches/{batch_id}").json()
    assert ended["request_counts"] == {"total": 9, "completed": 4, "failed": 5}
    source, output, error = contents(steady, ended)
    assert (numbers(output), numbers(error)) == ([1, 4, 5, 8], [0, 2, 3, 6, 7])
    check_output_files(ended, source=source, output=output, error=error)
