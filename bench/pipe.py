"""The way of a job through the pipe, measured on the real processes with engines that compute nothing.

`python -m bench.pipe --overhead [--calls 300] [--bulk 100000] [--rate 50] [--json]`: what the transparent endpoint
adds to a call of the engine, with nothing else to do and while that many bulk jobs wait and engines finish that many a
second. Direct calls, calls through the endpoint and jobs (POST /v1/jobs?wait) take turns, on kept-alive connections;
the overhead of one is its time less the median of the direct ones in the same run.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from bench.fake_engine import MODEL
from bench.stack import Stack, fake_engines, running_stack

_INSTANCES = 2
_SEQUENCES = 16  # at once, of each engine; a worker keeps up to 18 bulk jobs there (4 more, less 2 for others)
_IN_FLIGHT = _SEQUENCES + 2
_ENGINE_SECONDS = 0.02  # of a measured call
_GROUP_LINES = 50
_PAUSE_SECONDS = 0.06  # on average, between calls: they come when nobody expects them
_WARM_CALLS = 20
_BULK_FILE_LINES = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Milliseconds of each call, by way."""

    direct: list[float]
    endpoint: list[float]
    job: list[float]

    def overhead(self, way: str) -> dict[str, float]:
        base = statistics.median(self.direct)
        added = sorted(value - base for value in getattr(self, way))
        return {
            "median_ms": round(statistics.median(added), 1),
            "p99_ms": round(added[min(len(added) - 1, int(len(added) * 0.99))], 1),
            "most_ms": round(added[-1], 1),
        }


def measure_overhead(calls: int, bulk: int, rate: float) -> dict[str, Any]:
    """Idle, then loaded, on one set of processes."""
    with fake_engines(_INSTANCES) as urls:
        models = f"[models.{MODEL}]\n"
        instances = "".join(
            f'[instances.e{n}]\nengine = "openai"\nmodel = "{MODEL}"\nurl = "{url}"\n'
            f"options = {{ max_num_seqs = {_SEQUENCES}, kv_capacity_tokens = 1000000, block_size = 16 }}\n"
            for n, url in enumerate(urls)
        )
        with running_stack(models, instances, _INSTANCES, max_lines=max(bulk, 50_000)) as stack:
            found = {"idle": _report(_times(stack, urls[0], calls))}
            if bulk:
                seconds = _INSTANCES * _IN_FLIGHT / rate
                batches = _load(stack, bulk, seconds)
                before, began = _completed(stack, batches), time.monotonic()
                loaded = _report(_times(stack, urls[0], calls))
                finished = (_completed(stack, batches) - before) / (time.monotonic() - began)
                found["loaded"] = {**loaded, "bulk_jobs": bulk, "bulk_jobs_per_second": round(finished, 1)}
            return found


def _report(times: Times) -> dict[str, Any]:
    return {
        "calls": len(times.endpoint),
        "direct_median_ms": round(statistics.median(times.direct), 1),
        "endpoint": times.overhead("endpoint"),
        "job": times.overhead("job"),
    }


def _times(stack: Stack, engine_url: str, calls: int) -> Times:
    """Each way in turn, `calls` times, after some that do not count."""
    number = random.Random(7)
    times = Times(direct=[], endpoint=[], job=[])
    with httpx.Client(base_url=engine_url, timeout=60) as engine:
        ways: dict[str, Callable[[dict[str, Any]], httpx.Response]] = {
            "direct": lambda body: engine.post("/v1/chat/completions", json=body),
            "endpoint": lambda body: stack.http.post("/v1/chat/completions", json=body),
            "job": lambda body: stack.http.post("/v1/jobs?wait=60", json=_as_job(body)),
        }
        for count in range(_WARM_CALLS + calls):
            for way, call in ways.items():
                time.sleep(number.uniform(0, 2 * _PAUSE_SECONDS))
                stack.supervisor.turn()
                took_ms = _timed(call, _body(f"question {count}", _ENGINE_SECONDS))
                if count >= _WARM_CALLS:
                    getattr(times, way).append(took_ms)
    return times


def _timed(call: Callable[[dict[str, Any]], httpx.Response], body: dict[str, Any]) -> float:
    began = time.perf_counter()
    answer = call(body)
    took_ms = (time.perf_counter() - began) * 1000
    said = answer.json()
    if answer.status_code not in (200, 202) or said.get("status", "succeeded") != "succeeded":
        sys.exit(f"a call was not answered: {answer.status_code} {answer.text[:500]}")
    return took_ms


def _body(text: str, seconds: float) -> dict[str, Any]:
    messages = [{"role": "system", "content": "You are terse. " * 20}, {"role": "user", "content": text}]
    return {"model": MODEL, "messages": messages, "max_tokens": 8, "bench_seconds": seconds}


def _as_job(body: dict[str, Any]) -> dict[str, Any]:
    return {"endpoint": "/v1/chat/completions", "body": body}


def _load(stack: Stack, lines: int, seconds: float) -> list[str]:
    """Batches of so many lines, in progress and being worked on; their ids."""
    ids = []
    for first in range(0, lines, _BULK_FILE_LINES):
        count = min(_BULK_FILE_LINES, lines - first)
        content = b"".join(_lines(first, count, seconds))
        uploaded = stack.http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("bulk.jsonl", content)})
        made = {"input_file_id": uploaded.json()["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        ids.append(str(stack.http.post("/v1/batches", json=made).raise_for_status().json()["id"]))

    def is_under_way() -> bool:
        found = [stack.http.get(f"/v1/batches/{batch_id}").json() for batch_id in ids]
        is_whole = sum(item["request_counts"]["total"] for item in found) == lines
        is_taken_in = all(item["status"] == "in_progress" and item["queue"]["prefix_groups"] for item in found)
        return is_whole and is_taken_in and _completed(stack, ids) > 100

    stack.wait(is_under_way, 600, "the bulk jobs")
    return ids


def _lines(first: int, count: int, seconds: float) -> Iterator[bytes]:
    for number in range(first, first + count):
        system = f"Group {number // _GROUP_LINES}. " + "A rule of the house. " * 10
        body = {**_body(f"Item {number}", seconds), "messages": [{"role": "system", "content": system}]}
        body["messages"].append({"role": "user", "content": f"Item {number}"})
        line = {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
        yield json.dumps(line).encode() + b"\n"


def _completed(stack: Stack, batch_ids: list[str]) -> int:
    found = (stack.http.get(f"/v1/batches/{batch_id}").json() for batch_id in batch_ids)
    return sum(int(item["request_counts"]["completed"]) for item in found)


def table(found: dict[str, Any]) -> Iterator[str]:
    """One row for each way and load."""
    yield f"{'added to a direct call':38}{'median ms':>12}{'p99 ms':>10}{'most ms':>10}"
    for load, figures in found.items():
        for way, name in (("endpoint", "POST /v1/chat/completions"), ("job", "POST /v1/jobs?wait")):
            row = figures[way]
            cells = f"{row['median_ms']:>12}{row['p99_ms']:>10}{row['most_ms']:>10}"
            yield f"{load + ': ' + name:38}{cells}"
        yield f"{load}: {figures['calls']} calls each; a direct call took {figures['direct_median_ms']} ms"
        if "bulk_jobs" in figures:
            yield f"{load}: {figures['bulk_jobs']} bulk jobs, {figures['bulk_jobs_per_second']} finished each second"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.pipe", description=__doc__)
    parser.add_argument("--overhead", action="store_true", help="what a call gains in time on its way through")
    parser.add_argument("--calls", type=int, default=300, help="measured calls of each way")
    parser.add_argument("--bulk", type=int, default=100_000, help="bulk jobs that wait meanwhile; 0: idle only")
    parser.add_argument("--rate", type=float, default=50.0, help="bulk jobs that the engines finish each second")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on the last line")
    options = parser.parse_args()
    if not options.overhead:
        parser.error("say what to measure: --overhead")
    found = {"overhead": measure_overhead(options.calls, options.bulk, options.rate)}
    print("\n".join(table(found["overhead"])))
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
