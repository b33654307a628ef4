"""`GET /metrics`: the state of the fleet and of its cache in Prometheus' text format. No tenant and no batch is named.

Cheap at every scrape: what it is made of is read at most once in some seconds, whoever asks; sums over results go on
from where the last read ended (service/store/gauges.py). Every API process counts the same rows and shows the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from fastapi import APIRouter
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from service.api.auth import Caller
from service.api.context import context_of
from service.broker import instance_queue
from service.core.model import BootState, Priority
from service.store import gauges
from service.store.gauges import BatchGauge, BootGauge, QueueGauge, Series, Sums

router = APIRouter()

_FRESH_SECONDS = 5.0


@router.get("/metrics")
def metrics(request: Request, caller: Caller) -> Response:
    context = context_of(request)
    look = request.app.state.metrics.look(context.database.run)
    registry = CollectorRegistry()
    registry.register(_Families(look))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The figures of one moment."""

    sums: dict[Series, Sums]
    boots: Sequence[BootGauge]
    queues: Sequence[QueueGauge]
    batches: Sequence[BatchGauge]


class Metrics:
    """What an API process has read so far. Safe for threads: one reads, the others wait for it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._mark = 0  # results below this transaction are in the sums
        self._sums: dict[Series, Sums] = {}
        self._look: Look | None = None
        self._looked_at = 0.0

    def look(self, run: Callable[[Callable[[sa.Connection], Look]], Look]) -> Look:
        """The figures, at most some seconds old. `run` does work in a transaction."""
        with self._lock:
            if self._look is None or self._clock() - self._looked_at >= _FRESH_SECONDS:
                self._look = run(self._read)
                self._looked_at = self._clock()
            return self._look

    def _read(self, conn: sa.Connection) -> Look:
        """In this order: a mark, then what lies below it. Repeatable: a retry reads from the same mark again."""
        end = gauges.horizon(conn)
        new = gauges.sums_between(conn, self._mark, end)
        sums = {series: self._sums.get(series, Sums()) + part for series, part in new.items()}
        look = Look(
            sums={**self._sums, **sums},
            boots=gauges.boots(conn),
            queues=gauges.queues(conn),
            batches=gauges.open_batches(conn),
        )
        self._mark, self._sums = end, look.sums
        return look


class _Families(Collector):
    """The figures as metric families."""

    def __init__(self, look: Look) -> None:
        self._look = look

    def collect(self) -> Iterable[Metric]:
        yield from _result_counters(self._look.sums)
        yield from _miss_counters(self._look.sums)
        yield from _boot_gauges(self._look.boots)
        yield from _queue_gauges(self._look)
        yield from _batch_gauges(self._look.batches)


_TOKENS = {
    "prompt_tokens": "Prompt tokens of results whose cached tokens are known.",
    "cached_tokens": "Of these, tokens that the engine served from its cache, as it reports.",
    "predicted_cached_tokens": "Of these, tokens that the plan expected from the cache.",
    "completion_tokens": "Completion tokens of the same results.",
}


def _result_counters(sums: dict[Series, Sums]) -> Iterable[Metric]:
    jobs = CounterMetricFamily("trunkline_jobs", "Jobs that ended.", labels=["model", "instance", "outcome"])
    for (model, instance, outcome), part in _grouped(sums, "model", "instance", "outcome").items():
        jobs.add_metric([model, instance, outcome], part.jobs)
    yield jobs
    by_instance = _grouped(sums, "model", "instance")
    for name, help_ in _TOKENS.items():
        family = CounterMetricFamily(f"trunkline_{name}", help_, labels=["model", "instance"])
        for labels, part in by_instance.items():
            family.add_metric(list(labels), getattr(part, name))
        yield family
    unknown = CounterMetricFamily(
        "trunkline_unmeasured_jobs", "Answered jobs whose engine did not say its cached tokens.", labels=["instance"]
    )
    attempts = CounterMetricFamily(
        "trunkline_attempts", "Attempts that jobs took, one for each at least.", labels=["model", "instance"]
    )
    queued = SummaryMetricFamily("trunkline_queue_seconds", "From creation to claim.", labels=["model", "instance"])
    ran = SummaryMetricFamily("trunkline_run_seconds", "At the engine.", labels=["model", "instance"])
    for labels, part in by_instance.items():
        unknown.add_metric([labels[1]], part.unknown_jobs)
        attempts.add_metric(list(labels), part.attempts)
        queued.add_metric(list(labels), part.jobs, part.queue_ms / 1000)
        ran.add_metric(list(labels), part.jobs, part.run_ms / 1000)
    yield from (unknown, attempts, queued, ran)


def _miss_counters(sums: dict[Series, Sums]) -> Iterable[Metric]:
    labels = ["model", "instance", "cause"]
    jobs = CounterMetricFamily("trunkline_miss_jobs", "Jobs with a miss cause.", labels=labels)
    computed = CounterMetricFamily("trunkline_miss_computed_tokens", "Prompt tokens that they computed.", labels=labels)
    missing = CounterMetricFamily(
        "trunkline_missing_tokens", "Tokens predicted as cached, and computed all the same.", labels=labels
    )
    for names, part in _grouped(sums, "model", "instance", "cause").items():
        if names[2]:
            jobs.add_metric(list(names), part.jobs)
            computed.add_metric(list(names), part.prompt_tokens - part.cached_tokens)
            missing.add_metric(list(names), part.missing_tokens)
    yield from (jobs, computed, missing)


def _boot_gauges(boots: Sequence[BootGauge]) -> Iterable[Metric]:
    state = GaugeMetricFamily(
        "trunkline_instance_state",
        "1 for the state that the instance is in.",
        labels=["instance", "model", "engine", "state"],
    )
    mismatch = GaugeMetricFamily(
        "trunkline_key_mismatch",
        "1 where the engine's tokens or cache are not what the plan thinks.",
        labels=["instance"],
    )
    age = GaugeMetricFamily("trunkline_heartbeat_age_seconds", "Since the last heartbeat.", labels=["instance"])
    capacity = GaugeMetricFamily("trunkline_kv_capacity_tokens", "What the engine's cache holds.", labels=["instance"])
    running = GaugeMetricFamily("trunkline_engine_jobs", "Jobs at the engine, at its heartbeat.", labels=["instance"])
    for boot in boots:
        for each in BootState:
            if each is not BootState.GONE:
                state.add_metric([boot.name, boot.model, boot.engine, each], float(boot.state == each))
        mismatch.add_metric([boot.name], float(boot.key_agrees is False))
        age.add_metric([boot.name], boot.heartbeat_age_seconds)
        running.add_metric([boot.name], boot.running_jobs)
        if boot.kv_capacity_tokens is not None:
            capacity.add_metric([boot.name], boot.kv_capacity_tokens)
    yield from (state, mismatch, age, capacity, running)


def _queue_gauges(look: Look) -> Iterable[Metric]:
    """Of every live instance, zeros too, and of queues that nobody serves under their queue's name."""
    labels = ["instance", "priority"]
    waiting = GaugeMetricFamily("trunkline_waiting_jobs", "Jobs planned for the instance, not claimed.", labels=labels)
    flying = GaugeMetricFamily("trunkline_in_flight_jobs", "Jobs that its worker has claimed.", labels=labels)
    cohorts = GaugeMetricFamily("trunkline_open_cohorts", "Cohorts planned or running.", labels=labels)
    sizes = GaugeMetricFamily("trunkline_open_cohort_jobs", "Jobs in these cohorts, ended ones too.", labels=labels)
    found = {(item.queue, item.priority): item for item in look.queues}
    names = {instance_queue(boot.name): boot.name for boot in look.boots}
    for queue in sorted({*names, *(queue for queue, _ in found)}):
        for priority in Priority:
            item = found.get((queue, int(priority)))
            where = [names.get(queue, queue), priority.label]
            waiting.add_metric(where, item.waiting_jobs if item else 0)
            flying.add_metric(where, item.in_flight_jobs if item else 0)
            cohorts.add_metric(where, item.cohorts if item else 0)
            sizes.add_metric(where, item.cohort_jobs if item else 0)
    yield from (waiting, flying, cohorts, sizes)


def _batch_gauges(batches: Sequence[BatchGauge]) -> Iterable[Metric]:
    count = GaugeMetricFamily("trunkline_open_batches", "Batches with lines to end.", labels=["priority"])
    lines = GaugeMetricFamily("trunkline_unfinished_lines", "Lines of these that have not ended.", labels=["priority"])
    slack = GaugeMetricFamily(
        "trunkline_deadline_slack_seconds", "Until the first deadline of an open batch.", labels=["priority"]
    )
    for item in batches:
        label = [Priority(item.priority).label]
        count.add_metric(label, item.batches)
        lines.add_metric(label, item.unfinished_lines)
        slack.add_metric(label, item.slack_seconds)
    yield from (count, lines, slack)


def _grouped(sums: dict[Series, Sums], *names: str) -> dict[tuple[str, ...], Sums]:
    """The sums over all but these labels."""
    grouped: dict[tuple[str, ...], Sums] = {}
    for series, part in sorted(sums.items(), key=lambda item: item[0]):
        labels = tuple(getattr(series, name) for name in names)
        grouped[labels] = grouped.get(labels, Sums()) + part
    return grouped
