"""`trunkline plan` without a service: what it reads, refuses, prints and exports. Models here have no tokenizer."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefixes import backlog
from prefixes import jobs as random_jobs
from traces import trace_folder
from typer.testing import CliRunner

from service import forecast
from service.core import prefix
from service.core.plan import Limits
from service.core.policies import POLICIES
from service.core.scenario import EngineShape, jobs_at_once
from service.errors import InputRefused, ModelMissing
from service.planfile import write_plan
from trunkline.cli.app import build_app

FIGURES = {
    "jobs", "prompt_tokens", "bound", "hit_rate", "eta", "makespan_seconds", "makespan_gain_over_round_robin",
    "max_over_mean", "replicated_fraction", "plan_seconds", "policy", "baselines", "too_long", "prefix_groups",
    "simulated", "shared_share",
}  # fmt: skip
Plan = Callable[..., Any]
Runs = dict[int, list[dict[str, int]]]


def entry(prompt: int, output: int, ids: list[int], **more: object) -> bytes:
    """A line of a trace."""
    return json.dumps({"input_length": prompt, "output_length": output, "hash_ids": ids, **more}).encode()


def request(number: int, text: str = "hello", **body: object) -> bytes:
    """A line of a batch; 4 bytes count as one token."""
    content = {"model": "plain", "max_tokens": 5, "messages": [{"role": "user", "content": text}], **body}
    line = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/chat/completions", "body": content}
    return json.dumps(line).encode()


def family_trace(families: int = 5, each: int = 8) -> bytes:
    """Families of prompts that share 3 of their 4 blocks, one of each family after the other."""
    lines = [
        entry(2_000 + number, 10 + family, [100 * family, 100 * family + 1, 100 * family + 2, 10_000 * family + number])
        for number in range(each)
        for family in range(1, families + 1)
    ]
    return b"\n".join(lines) + b"\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command runs: a models.toml with two models that have no tokenizer."""
    (tmp_path / "models.toml").write_text(
        '[models.plain]\naliases = ["simple"]\n[models.other]\n[models.vectors]\nendpoints = ["/v1/embeddings"]\n'
    )
    monkeypatch.setenv("MODELS", str(tmp_path / "models.toml"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def plan(folder: Path) -> Plan:
    """Runs the command on these bytes; the JSON object, or what an option in place of --json prints."""

    def run(data: bytes, *options: str, shape: tuple[str, ...] = ("--instances", "2", "--kv-tokens", "1e5")) -> Any:
        (folder / "input.jsonl").write_bytes(data)
        arguments = ["plan", "input.jsonl", *shape, *options, "--json"]
        result = CliRunner().invoke(build_app(arguments), arguments)
        if result.exception is not None:
            raise result.exception
        return json.loads(result.stdout)

    return run


def exported(path: Path) -> Runs:
    """The jobs of each instance, after checking what holds for every plan."""
    rows = [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
    assert all(set(row) == {"index", "instance", "cohort", "position"} for row in rows)
    assert len({row["index"] for row in rows}) == len(rows)
    runs: Runs = defaultdict(list)
    cohorts: list[int] = []
    for row in rows:
        assert row["position"] == len(runs[row["instance"]])
        runs[row["instance"]].append(row)
        if not cohorts or cohorts[-1] != row["cohort"]:
            cohorts.append(row["cohort"])
    assert len(set(cohorts)) == len(cohorts)
    assert all(len({row["instance"] for row in rows if row["cohort"] == cohort}) == 1 for cohort in cohorts)
    return runs


def test_a_trace_is_planned_into_families(plan: Plan, folder: Path) -> None:
    found = plan(family_trace(), "--export", "plan.jsonl")
    assert set(found) >= FIGURES
    assert (found["kind"], found["jobs"], found["prefix_groups"], found["block_size"]) == ("trace", 40, 5, 512)
    shared = 5 * 7 * 3 * 512  # all but the first of each family find three blocks
    assert found["bound"] == pytest.approx(shared / found["prompt_tokens"])
    assert found["shared_share"] == pytest.approx((shared + 5 * 3 * 512) / found["prompt_tokens"])
    assert found["policy"] == "prefix"
    assert 0.95 <= found["eta"] <= 1  # near the end one instance takes the last prompts of a family from the other
    assert found["replicated_fraction"] == pytest.approx(found["bound"] - found["hit_rate"])
    assert found["makespan_gain_over_round_robin"] > 1
    assert set(found["baselines"]) == set(POLICIES) - {"prefix", "ledger"}
    assert found["baselines"]["round_robin"]["makespan_gain_over_round_robin"] == 1.0
    runs = exported(folder / "plan.jsonl")
    assert sorted(row["index"] for run in runs.values() for row in run) == list(range(40))
    for run in runs.values():
        families = [row["index"] % 5 for row in run]
        changes = sum(before != after for before, after in pairwise(families))
        assert changes == len(set(families)) - 1  # one after the other, none interleaved


def test_what_is_shared_is_counted_at_the_block_size_asked_for(plan: Plan) -> None:
    lines = b"\n".join(entry(80, 1, [1, 2, 3, 4, number]) for number in range(5, 8))
    assert plan(lines, "--block-size", "16")["bound"] == pytest.approx(2 * 64 / 240)
    assert plan(lines, "--block-size", "32", "--trace-block-size", "16")["bound"] == pytest.approx(2 * 64 / 240)


def test_a_batch_is_planned_with_the_model_it_names(plan: Plan) -> None:
    lines = b"\n".join(request(number, "same words " * 40 + str(number)) for number in range(6))
    found = plan(lines)
    assert (found["kind"], found["model"], found["jobs"], found["block_size"]) == ("batch", "plain", 6, 16)
    assert found["byte_keyed_jobs"] == 6
    assert found["output_tokens"] == 6 * 5
    assert found["bound"] > 0.5
    assert plan(lines, "--model", "other")["model"] == "other"
    assert plan(lines.replace(b"plain", b"elsewhere/not-served"), "--model", "simple")["model"] == "plain"


def test_line_numbers_survive_marks_blank_lines_and_endings(plan: Plan, folder: Path) -> None:
    for data in (
        b"\xef\xbb\xbf" + b"\r\n".join([request(0), b"", b"  ", request(1)]),
        b"\xef\xbb\xbf" + b"\r\n".join([entry(5, 1, [1]), b"", b"", entry(6, 1, [2]), b""]),
    ):
        plan(data, "--export", "plan.jsonl", "--no-baselines")
        runs = exported(folder / "plan.jsonl")
        assert sorted(row["index"] for run in runs.values() for row in run) == [0, 3]


def test_standard_input_is_read(folder: Path) -> None:
    arguments = ["plan", "-", "--instances", "1_0", "--kv-tokens", "1e5", "--json", "--no-baselines"]
    result = CliRunner().invoke(build_app(arguments), arguments, input=family_trace())
    assert (result.exit_code, result.exception) == (0, None)
    found = json.loads(result.stdout)
    assert (found["instances"], found["kv_tokens"], found["input"]) == (10, 100_000, "standard input")
    assert set(found["baselines"]) == {"round_robin"}


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_exports_every_job_once(plan: Plan, folder: Path, policy: str) -> None:
    found = plan(family_trace(), "--policy", policy, "--export", "plan.jsonl", "--no-baselines")
    assert found["policy"] == policy
    runs = exported(folder / "plan.jsonl")
    assert sorted(row["index"] for run in runs.values() for row in run) == list(range(40))
    if policy == "round_robin":
        assert {number: [row["index"] for row in run] for number, run in runs.items()} == {
            0: list(range(0, 40, 2)),
            1: list(range(1, 40, 2)),
        }


def test_a_window_plans_in_file_order(plan: Plan, folder: Path) -> None:
    found = plan(family_trace(), "--window", "10", "--export", "plan.jsonl", "--no-baselines")
    assert found["window"] == 10
    for run in exported(folder / "plan.jsonl").values():
        windows = [row["index"] // 10 for row in run]
        assert windows == sorted(windows)
    assert found["eta"] < 1.0


@pytest.mark.parametrize(
    ("shape", "data"),
    [
        (("--instances", "9", "--kv-tokens", "1e5"), entry(700, 1, [1, 2])),  # more instances than jobs
        (("--instances", "2", "--kv-tokens", "1e5"), b"\n".join([entry(2_000, 4, [1, 2, 3, 4])] * 50)),  # all alike
        (("--instances", "2", "--kv-tokens", "1e12"), b"\n".join([entry(0, 0, [])] * 3)),  # nothing to do
    ],
)
def test_figures_of_odd_inputs_are_numbers(plan: Plan, shape: tuple[str, ...], data: bytes) -> None:
    found = plan(data, "--no-baselines", shape=shape)
    assert found["jobs"] == data.count(b"input_length")
    assert 0 <= found["hit_rate"] <= found["bound"] <= 1
    assert 0 <= found["eta"] <= 1
    assert found["max_over_mean"] >= 1
    assert found["makespan_gain_over_round_robin"] > 0


REFUSED = {
    "empty": (b"", "input.jsonl holds no line"),
    "blank": (b"\n \r\n", "input.jsonl holds no line"),
    "binary": (b"\x00\xff\xfe" * 100, "neither a batch file (custom_id, method, url, body) nor a trace"),
    "text": (b"hello\n", "line 1 is not JSON"),
    "no object": (b"[1]\n", "line 1 has other members"),
    "bad line": (request(0) + b"\n\n{\n", "input.jsonl: Line 3: The line is not valid JSON"),
    "not UTF-8": (request(0) + b'\n{"a": "\xe9"}\n', "Line 2: The line is not valid JSON: not UTF-8"),
    "repeated id": (request(7) + b"\n" + request(7), "Line 2: custom_id 'c7' is already used on line 1"),
    "unknown model": (
        request(0, model="gpt"),
        "Line 1: The model 'gpt' is not served. MODELS has plain, simple",
    ),
    "two models": (request(0) + b"\n" + request(1, model="other"), "Line 2 asks for the model other, line 1 for plain"),
    "wrong endpoint": (request(0, model="vectors"), "Line 1: The model 'vectors' is not served"),
    "unknown url": (request(0).replace(b"chat", b"cat"), "Line 1: url must be one of"),
    "no url": (request(0).replace(b'"url"', b'"uri"'), "Line 1: Missing required parameter: 'url'"),
    "negative": (entry(1, 1, [1]) + b"\n" + entry(-1, 1, []), "Line 2: input_length must be between"),
    "NaN": (entry(1, 1, [1]) + b'\n{"input_length": NaN}', "Line 2 is not JSON: NaN"),
    "ids": (b"\n" + entry(600, 1, [1]), "Line 2: 1 hash_ids do not match input_length 600"),
    "half a trace": (b'{"input_length": 1}', "Line 1: output_length must be an integer, and is missing"),
    "two kinds": (entry(1, 1, [1]) + b"\n" + request(0), "Line 2: input_length must be an integer, and is missing"),
    "too long": (
        entry(9, 1, [1]) + b"\n" + entry(200_000, 100, list(range(391))),
        "1 of 2 jobs in input.jsonl do not fit a cache of 99,840 tokens; the largest, line 2, needs 200,099",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_in_one_sentence(plan: Plan, folder: Path, name: str) -> None:
    data, why = REFUSED[name]
    with pytest.raises(InputRefused) as refused:
        plan(data, "--export", "plan.jsonl")
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)
    assert refused.value.exit_status == 2
    assert not (folder / "plan.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--instances", "0"), "--instances is 0; it must be from 1 to 1,000."),
        (("--instances", "-1"), "--instances is -1; it must be"),
        (("--instances", "nan"), "--instances is nan; a whole number was expected."),
        (("--kv-tokens", "inf"), "--kv-tokens is inf; a whole number was expected."),
        (("--instances", "1.5"), "--instances is 1.5; a whole number was expected."),
        (("--instances", "two"), "--instances is two; a whole number was expected."),
        (("--kv-tokens", "1e400000000"), "--kv-tokens is 1e400000000; it must be"),
        (("--kv-tokens", "511"), "--kv-tokens is 511, less than one block of 512 tokens."),
        (("--block-size", "0"), "--block-size is 0; it must be from 1 to 65,536."),
        (("--window", "0"), "--window is 0; it must be"),
        (("--policy", "best"), "--policy is best; it must be one of prefix, round_robin"),
        (("--max-batched-tokens", "63"), "--max-batched-tokens must be at least --max-num-seqs"),
        (("--export", "nowhere/plan.jsonl"), "nowhere is not there."),
        (("--export", "."), "--export: . is a folder."),
        (("--export", "input.jsonl"), "--export: input.jsonl is INPUT itself."),
        (("--export", "a" * 300), "File name too long."),
        (("--export", "-"), "--export needs a file"),
        (("--cost", "nowhere.json"), "--cost: nowhere.json cannot be read: No such file or directory."),
        (("--cost", "input.jsonl"), "--cost: input.jsonl is not JSON"),
    ],
)
def test_bad_options_are_refused_in_one_sentence(plan: Plan, options: tuple[str, ...], why: str) -> None:
    with pytest.raises(InputRefused) as refused:
        plan(family_trace(), *options)
    assert why in str(refused.value)


def test_the_block_size_of_a_trace_is_refused_for_a_batch(plan: Plan) -> None:
    with pytest.raises(InputRefused, match="is a batch file: --trace-block-size is for traces only"):
        plan(request(1), "--trace-block-size", "32")


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{}",
        '{"x": 1}',
        '{"cost": null}',
        '{"step_seconds": -1}',
        "NaN",
        '{"step_seconds": true}',
        '{"step_seconds": 1e9}',
        '{"step_seconds": 0, "prefill_token_seconds": 0}',
    ],
)
def test_a_cost_file_holds_seconds(plan: Plan, folder: Path, content: str) -> None:
    (folder / "cost.json").write_text(content)
    with pytest.raises(InputRefused, match=r"--cost: cost\.json"):
        plan(family_trace(), "--cost", "cost.json")


def test_the_cost_file_decides_how_long_it_takes(plan: Plan, folder: Path) -> None:
    usual = plan(family_trace(), "--no-baselines")
    (folder / "cost.json").write_text(json.dumps({"instances": [], "cost": usual["cost"]}))
    assert (
        plan(family_trace(), "--no-baselines", "--cost", "cost.json")["makespan_seconds"] == usual["makespan_seconds"]
    )
    doubled = {name: 2 * seconds for name, seconds in usual["cost"].items()}
    (folder / "cost.json").write_text(json.dumps(doubled))
    slow = plan(family_trace(), "--no-baselines", "--cost", "cost.json")
    assert slow["makespan_seconds"] == pytest.approx(2 * usual["makespan_seconds"])


def test_what_is_too_long_is_left_out_when_asked(plan: Plan, folder: Path) -> None:
    longer = entry(200_000, 1, list(range(391)))
    with pytest.raises(InputRefused, match=r"3 of 43 jobs in input.jsonl do not fit a cache"):
        plan((longer + b"\n") * 3 + family_trace())
    assert plan(longer + b"\n" + family_trace(), "--no-baselines")["too_long"] == 1  # few of a trace: without asking
    found = plan(longer + b"\n" + family_trace(), "--skip-too-long", "--export", "plan.jsonl", "--no-baselines")
    assert (found["jobs"], found["too_long"]) == (40, 1)
    runs = exported(folder / "plan.jsonl")
    assert sorted(row["index"] for run in runs.values() for row in run) == list(range(1, 41))
    with pytest.raises(InputRefused, match=r"no job of input.jsonl fits a cache of 99,840 tokens"):
        plan(longer, "--skip-too-long")


def test_models_that_cannot_be_used_are_named(plan: Plan, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputRefused, match="--model: nobody is not served; MODELS has plain, simple, other, vectors"):
        plan(request(0), "--model", "nobody")
    with pytest.raises(InputRefused, match="vectors does not serve the endpoint"):
        plan(request(0), "--model", "vectors")
    (folder / "broken").mkdir()
    (folder / "broken" / "tokenizer.json").write_text("{}")
    (folder / "models.toml").write_text('[models.plain]\ntokenizer = "broken"\n')
    with pytest.raises(ModelMissing, match="broken holds no readable tokenizer"):
        plan(request(0))
    monkeypatch.setenv("MODELS", str(folder / "nowhere.toml"))
    with pytest.raises(InputRefused, match=r"there is no .*nowhere\.toml: set MODELS"):
        plan(request(0))
    assert plan(family_trace(), "--no-baselines")["jobs"] == 40  # a trace needs no model


def test_the_tables_fit_80_columns_and_say_simulated(folder: Path) -> None:
    (folder / "in [bold] put.jsonl").write_bytes(family_trace())
    arguments = ["plan", "in [bold] put.jsonl", "--instances", "2", "--kv-tokens", "1e5"]
    result = CliRunner(env={"COLUMNS": "80"}).invoke(build_app(arguments), arguments)
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "Simulated: nothing was run" in result.stdout
    for name in ("in [bold] put.jsonl", "prefix groups  5", "shared share", "bound", "round robin", "shared queue"):
        assert name in result.stdout


def test_what_a_reader_must_know_goes_to_standard_error(folder: Path) -> None:
    (folder / "long.jsonl").write_bytes(entry(200_000, 1, list(range(391))) + b"\n" + family_trace())
    arguments = ["plan", "long.jsonl", "--instances", "1", "--kv-tokens", "1e5", "--skip-too-long", "--model", "plain"]
    result = CliRunner().invoke(build_app(arguments), [*arguments, "--no-baselines", "--export", "out.jsonl"])
    assert result.exit_code == 0
    assert "Left out, as longer than the cache: 1 of 41 jobs." in result.stderr
    assert "A trace holds no text, so --model changes nothing." in result.stderr
    assert "Wrote the plan of 40 jobs to out.jsonl." in result.stderr


def test_a_plan_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "old.jsonl").write_text("old")

    def cohorts() -> Any:
        raise KeyboardInterrupt
        yield

    with pytest.raises(KeyboardInterrupt):
        write_plan(tmp_path / "old.jsonl", cohorts())
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("old.jsonl", "old")]
    (tmp_path / "link.jsonl").symlink_to("old.jsonl")
    write_plan(tmp_path / "link.jsonl", [])
    assert (tmp_path / "link.jsonl").is_symlink()
    assert (tmp_path / "old.jsonl").read_bytes() == b""


@given(
    jobs=random_jobs, instances=st.integers(1, 5), window=st.none() | st.integers(1, 50), name=st.sampled_from(POLICIES)
)
def test_a_plan_has_every_job_once(jobs: list[Any], instances: int, window: int | None, name: str) -> None:
    known = jobs_at_once(backlog(jobs))
    shape = EngineShape(block_size=32, kv_capacity_tokens=1_000, max_num_seqs=4)
    fleet = forecast.Fleet(instances=instances, shape=shape, limits=Limits(), window_jobs=window)
    cohorts, seconds = forecast.make_plan(known, fleet, name)
    assert sorted(np.concatenate([cohort.job_ids for cohort in cohorts]).tolist()) == known.jobs.job_ids.tolist()
    assert [cohort.instance for cohort in cohorts] == sorted(cohort.instance for cohort in cohorts)
    assert seconds >= 0


@given(jobs=random_jobs)
def test_sharing_is_what_the_prefix_functions_say(jobs: list[Any]) -> None:
    known = jobs_at_once(backlog(jobs))
    found = forecast.measure_sharing(known, 32)
    order = prefix.sort_order(known.jobs.keys, known.jobs.prompt_tokens)
    keys = [known.jobs.keys[place] for place in order.tolist()]
    assert found.bound_tokens == prefix.bound_tokens(known.jobs.keys, known.jobs.prompt_tokens, 32)
    assert found.prefix_groups == prefix.prefix_groups(keys, known.jobs.prompt_tokens[order])[-1] + 1
    assert found.bound_tokens <= found.shared_tokens <= found.prompt_tokens


def test_the_conversation_trace_has_the_bound_its_readme_gives(folder: Path) -> None:
    trace = trace_folder() / "conversation_trace.jsonl"
    arguments = ["plan", str(trace), "--instances", "8", "--kv-tokens", "1e5", "--json", "--no-baselines"]
    result = CliRunner().invoke(build_app(arguments), arguments)
    assert result.exception is None
    found = json.loads(result.stdout)
    assert (found["jobs"], found["too_long"]) == (11_963, 68)
    assert found["bound"] == pytest.approx(0.380, abs=0.0005)
    assert found["eta"] >= 0.98


def test_every_figure_is_documented(plan: Plan) -> None:
    text = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.+?`) \|", text.partition("## What the figures mean")[2].partition("\n## ")[0], re.M)
    assert {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)} == set(plan(family_trace()))
    policies = re.findall(r"^\| `([a-z_]+)` \|", text.partition("## What it is compared with")[2], re.M)
    assert {*policies, "prefix"} == set(POLICIES)
