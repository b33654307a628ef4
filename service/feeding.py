"""Takes cohorts from the backlog in memory and writes them for the instances that have room: just ahead of the engines,
since what is written can be stolen only with effort, and what is out not at all."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from service.core.classes import PriorityClasses
from service.core.plan import PlannedCohort
from service.live_backlog import LiveBacklog
from service.planner_input import FleetLoad, bulk_room, instance_view
from service.store import backlog, dispatching
from service.store.backlog import NewCohort
from service.store.dispatching import OpenWork
from service.store.instances import Boot
from service.store.session import Database

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Mouth:
    """A boot, what it has, and what it was given on top of that. What is ready in the table counts as had."""

    index: int  # in the fleet as the policy knows it
    boot: Boot
    cohorts: int
    work: OpenWork
    is_dry: bool = False  # there was nothing for it

    @property
    def is_hungry(self) -> bool:
        room = bulk_room(self.boot, self.cohorts, self.work)
        return not self.is_dry and room.most_cohorts > 0 and (room.jobs > 0 or room.least_cohorts > 0)

    def give(self, item: PlannedCohort) -> None:
        self.cohorts += 1
        self.work = OpenWork(
            jobs=self.work.jobs + len(item.job_ids),
            new_tokens=self.work.new_tokens + item.prompt_tokens - int(item.predicted_cached_tokens.sum()),
            output_tokens=self.work.output_tokens,  # as far as it is known; what is new weighs by its prompts
        )


class Feeding:
    """One model at a time. Remembers which boots it has met, since only a new one's cache has to be asked about."""

    def __init__(self, database: Database, live: LiveBacklog) -> None:
        self._database = database
        self._live = live
        self._met: dict[str, set[int]] = {}  # by model: boot ids

    def feed(self, model: str, fleet: FleetLoad, now_seconds: float) -> set[int]:
        """Cohorts in state ready for every boot of the model that has room. Returns the ids of the boots that could
        have taken more."""
        boots = fleet.of_model(model)
        policy = self._live.policy(model)
        self._tell(policy, model, boots, fleet, now_seconds)
        mouths = self._database.run(lambda conn: [_mouth(conn, place, boot, fleet) for place, boot in enumerate(boots)])
        taken = _take(policy, mouths, now_seconds)
        if taken:
            self._write(model, boots, taken)
        return {mouth.boot.id for mouth in mouths if mouth.is_dry}

    def _tell(
        self, policy: PriorityClasses, model: str, boots: Sequence[Boot], fleet: FleetLoad, now_seconds: float
    ) -> None:
        """The fleet and its loads, as they are now. A boot that was not met holds what its cohorts ended on."""
        met = self._met.get(model, set())
        new = [(boot.id, boot.queue) for boot in boots if boot.id not in met]
        held = self._database.run(lambda conn: backlog.last_keys(conn, new)) if new else {}
        self._met[model] = {boot.id for boot in boots}
        loads = [fleet.seconds(boot.queue) for boot in boots]
        views = [instance_view(boot, held.get(boot.queue), seconds) for boot, seconds in zip(boots, loads, strict=True)]
        policy.set_instances(views, now_seconds)
        policy.set_loads(loads, [fleet.bulk_jobs(boot.queue) for boot in boots])

    def _write(self, model: str, boots: Sequence[Boot], taken: Sequence[PlannedCohort]) -> None:
        def write(conn: sa.Connection) -> None:
            sequence = backlog.next_sequence(conn)
            rows = [_row(model, boots[item.instance].queue, sequence + n, item) for n, item in enumerate(taken)]
            backlog.insert_cohorts(conn, rows)

        self._database.run(write)
        job_ids = [job_id for item in taken for job_id in item.job_ids.tolist()]
        self._live.settle(self._database, model, job_ids)
        log.debug("model=%s cohorts=%d jobs=%d written", model, len(taken), len(job_ids))


def _mouth(conn: sa.Connection, index: int, boot: Boot, fleet: FleetLoad) -> _Mouth:
    active, ready, ready_jobs = (
        fleet.count(boot.queue, what, interactive=False) for what in ("active_cohorts", "ready_cohorts", "ready_jobs")
    )
    work = dispatching.open_work(conn, boot.id)
    work = OpenWork(jobs=work.jobs + ready_jobs, new_tokens=work.new_tokens, output_tokens=work.output_tokens)
    return _Mouth(index=index, boot=boot, cohorts=active + ready, work=work)


def _take(policy: PriorityClasses, mouths: Sequence[_Mouth], now_seconds: float) -> list[PlannedCohort]:
    """Cohort by cohort in turn, so that the last ones do not all go to the first instance."""
    taken: list[PlannedCohort] = []
    hungry = [mouth for mouth in mouths if mouth.is_hungry]
    while hungry:
        for mouth in hungry:
            cohort = policy.next_cohort(mouth.index, now_seconds)
            if cohort is None:
                mouth.is_dry = True
                continue
            taken.append(cohort)
            mouth.give(cohort)
        hungry = [mouth for mouth in hungry if mouth.is_hungry]
    return taken


def _row(model: str, queue: str, sequence: int, item: PlannedCohort) -> NewCohort:
    return NewCohort(
        model=model,
        queue=queue,
        sequence=sequence,
        priority=item.priority,
        alone=False,
        body_bytes=item.body_bytes,
        estimated_seconds=item.estimated_seconds,
        job_ids=item.job_ids.tolist(),
        predicted_cached_tokens=item.predicted_cached_tokens.tolist(),
        first_of_group=item.first_of_group.tolist(),
    )
