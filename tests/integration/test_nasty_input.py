"""Input that breaks careless readers, from the SDK's upload to the result files; and a good batch after each."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import openai
import pytest
from control_fixtures import jsonl, make_desk, request
from plant import Plant, check_accounting, plant, running_plant, standing  # noqa: F401 - two are fixtures

from service.control import run_task
from service.core.model import BatchStatus
from service.settings import Settings
from service.store.session import Database

pytestmark = pytest.mark.embedded_only

# What text-mode readers and str.splitlines cut at, and JSON lets stand raw in a string.
RAW_SEPARATORS = "a\u2028b\u2029c\x85d\x7fe\ufefff"
# What JSON must escape; NUL too, which Postgres' text cannot hold.
ESCAPED = "".join(map(chr, range(0x20))) + "\\ud83d\\ude00 \x1b[31m"


def raw(custom_id: str, **fields: Any) -> bytes:
    """A line whose characters beyond ASCII stand as they are."""
    return json.dumps(request(custom_id, **fields), ensure_ascii=False).encode()


def errors_of(batch: openai.types.Batch) -> list[tuple[str | None, int | None, str | None]]:
    assert batch.errors is not None
    return [(error.code, error.line, error.param) for error in batch.errors.data or []]


def test_mark_crlf_blank_lines_and_no_final_newline_in_one_file_keep_the_physical_line_numbers(plant: Plant) -> None:
    data = b"\xef\xbb\xbf" + raw("a") + b"\r\n\r\n \t \r\n" + raw("b") + b"\n\n" + raw("c") + b"\r\n" + raw("d")
    batch = plant.run(data)
    assert batch.status == "completed"
    good, _ = check_accounting(plant, batch, 4)
    assert {line["custom_id"] for line in good} == {"a", "b", "c", "d"}
    assert [row.line_no for row in plant.api.desk().jobs(batch.id)] == [1, 4, 6, 7]

    failed = plant.run(data.replace(raw("b"), b"{bad").replace(raw("d"), b"{worse"))
    assert (failed.status, errors_of(failed)) == (
        "failed",
        [("invalid_json_line", 4, None), ("invalid_json_line", 7, None)],
    )
    assert failed.request_counts is not None
    assert (failed.request_counts.total, failed.output_file_id, failed.error_file_id) == (0, None, None)


def test_raw_separators_and_escaped_control_characters_come_back_one_record_a_line(plant: Plant) -> None:
    asked = {"raw\u2028id\u2029": RAW_SEPARATORS, "escaped": ESCAPED}
    batch = plant.run(b"\n".join(raw(name, text=text) for name, text in asked.items()))
    assert sorted(body["messages"][0]["content"] for body in plant.server.requests) == sorted(asked.values())
    good, _ = check_accounting(plant, batch, 2)
    answers = {line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"] for line in good}
    assert answers == asked
    content = plant.api.sdk().files.content(str(batch.output_file_id)).read()
    assert content.isascii()
    assert content.count(b"\n") == 2
    assert content.endswith(b"\n")


def test_a_refused_line_with_raw_separators_in_its_custom_id_comes_back_whole(plant: Plant) -> None:
    named = json.dumps(request("odd\u2028name", url="/v1/other"), ensure_ascii=False).encode()
    batch = plant.run(named + b"\n" + raw("good"), queue={"on_invalid_line": "skip"})
    _, bad = check_accounting(plant, batch, 2)
    assert [(line["custom_id"], line["error"]["code"]) for line in bad] == [("odd\u2028name", "skipped_invalid_line")]
    assert bad[0]["error"]["message"].startswith("invalid_url")


def test_a_lone_carriage_return_does_not_separate_records(plant: Plant) -> None:
    batch = plant.run(raw("a") + b"\r" + raw("b") + b"\n" + raw("c"))
    assert (batch.status, errors_of(batch)) == ("failed", [("invalid_json_line", 1, None)])
    spread = raw("d").replace(b", ", b",\r ")  # white space between the tokens of one record
    assert plant.run(spread).status == "completed"


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        (b"[]", "invalid_request", None),
        (b"null", "invalid_request", None),
        (b"1", "invalid_request", None),
        (b'"x"', "invalid_request", None),
        (b"{}", "missing_required_parameter", "custom_id"),
        (json.dumps(request("a", body=json.dumps({"model": "tiny"}))).encode(), "invalid_request", "body"),
        (b"[" * 100_000, "invalid_json_line", None),
        (b'{"custom_id": ' + b"9" * 5_000 + b"}", "invalid_json_line", None),
        (b"\xff\xfe" + raw("a"), "invalid_json_line", None),
        (raw("a").decode().encode("utf-16"), "invalid_json_line", None),
        (b"\0" * 1_000, "invalid_json_line", None),
    ],
    ids=["array", "null", "number", "string", "empty", "body", "deep", "digits", "bytes", "utf-16", "nul"],
)
def test_what_is_no_request_is_named_and_nothing_runs(plant: Plant, line: bytes, code: str, param: str | None) -> None:
    """UTF-16 holds the byte 0x0A nowhere in this line, so it is one line."""
    batch = plant.run(raw("first") + b"\n" + line + b"\n")
    assert (batch.status, errors_of(batch)) == ("failed", [(code, 2, param)])
    assert plant.server.requests == []


def test_a_line_of_20_mb_is_too_long_and_costs_no_other_line(plant: Plant) -> None:
    long = raw("long", text="x" * 20_000_000)
    batch = plant.run(raw("a") + b"\n" + long + b"\n" + raw("b"))
    assert (batch.status, errors_of(batch)) == ("failed", [("line_too_long", 2, None)])
    skipping = plant.run(raw("a") + b"\n" + long + b"\n" + raw("b"), queue={"on_invalid_line": "skip"})
    good, bad = check_accounting(plant, skipping, 3)
    assert {line["custom_id"] for line in good} == {"a", "b"}
    assert bad[0]["error"]["message"].startswith("line_too_long")


def test_a_line_just_within_the_limit_runs(settings: Settings, database: Database, broker_url: str) -> None:
    line = raw("a", text="y" * 90_000)
    with running_plant(settings, database, broker_url, max_line_bytes=len(line)) as plant:
        assert plant.run(line + b"\r\n").status == "completed"
        assert errors_of(plant.run(line + b" ")) == [("line_too_long", 1, None)]


def test_a_name_that_is_a_path_is_only_a_name(plant: Plant) -> None:
    sdk = plant.api.sdk()
    made = sdk.files.create(file=("../../x.jsonl", raw("a")), purpose="batch")
    assert made.filename == "x.jsonl"
    store = plant.api.settings.state_folder
    assert not [path for path in store.parent.rglob("*") if path.name == "x.jsonl"]
    assert all(path.is_relative_to(store / "files") for path in store.rglob("*") if path.is_file())
    assert sdk.files.content(made.id).read() == raw("a")


MOST_BYTES = 40 * 2**20


def test_50_000_lines_with_a_repeated_id_at_the_end_are_judged_in_bounded_memory(
    settings: Settings, database: Database
) -> None:
    """The file has 50 MB; what is held is a digest a line and a thousand lines at a time."""
    desk = make_desk(settings, database)
    padding = "p" * 850
    names = [f"line-{n}" for n in range(49_999)] + ["line-0"]
    data = jsonl(request(name, text=padding) for name in names)
    batch_id, task_id = desk.create(data)
    assert len(data) > 50_000_000
    del data, names
    tracemalloc.start()
    try:
        run_task(desk.work, task_id)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    batch = desk.batch(batch_id)
    assert batch.status == BatchStatus.FAILED
    assert batch.errors == [
        {
            "code": "duplicate_custom_id",
            "line": 50_000,
            "message": "custom_id 'line-0' is already used on line 1.",
            "param": "custom_id",
        }
    ]
    assert peak_bytes < MOST_BYTES, f"{peak_bytes:,}"
    assert desk.batch(desk.take_in(jsonl([request("next")]))).status == BatchStatus.IN_PROGRESS
