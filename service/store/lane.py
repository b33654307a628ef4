"""Single jobs as their lane moves them: from the backlog to an instance in one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import func
from sqlalchemy.dialects.postgresql import ARRAY

from service.core.model import BootState, CohortState, Priority
from service.store.backlog import NewCohort, cohort_row
from service.store.dispatching import Message
from service.store.frozen import Frozen
from service.store.listen import notify
from service.store.tables import cohort, cohort_event, instance_boot, job, job_result


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """What is open for one queue. With a suspect among it nothing else goes out: it runs beside nothing."""

    seconds: float = 0.0
    interactive_cohorts: int = 0  # that are out
    has_suspect: bool = False


_IS_INTERACTIVE = sa.and_(cohort.c.priority >= Priority.INTERACTIVE, cohort.c.state != CohortState.READY)
# The index of open cohorts has the states as its predicate: they must stand in the text.
_IS_OPEN = sa.text("cohort.state in ('ready', 'dispatched', 'running')")
_AHEAD = Frozen(
    sa.select(
        cohort.c.queue,
        func.sum(cohort.c.estimated_seconds).label("seconds"),
        func.count().filter(_IS_INTERACTIVE).label("interactive"),
        func.bool_or(cohort.c.alone).label("has_suspect"),
    )
    .where(_IS_OPEN)
    .group_by(cohort.c.queue)
)


def work_ahead(conn: sa.Connection) -> dict[str, Ahead]:
    """By queue; no row for one that has nothing."""
    return {
        row.queue: Ahead(seconds=row.seconds, interactive_cohorts=row.interactive, has_suspect=row.has_suspect)
        for row in _AHEAD.run(conn)
    }


def _made() -> sa.CTE:
    """The cohort's row, where its boot is ready, and stays so until this transaction ends."""
    names = ("model", "queue", "priority", "alone", "n_jobs", "body_bytes", "estimated_seconds")
    boot = instance_boot.c.id == sa.bindparam("boot_id")
    values = {
        **{name: sa.bindparam(name, type_=cohort.c[name].type) for name in names},
        "sequence": sa.select(func.coalesce(func.max(cohort.c.sequence), 0) + 1).scalar_subquery(),
        "state": sa.literal(CohortState.DISPATCHED.value),
        "dispatch_no": sa.literal(1),
        "dispatched_at": func.now(),
        "instance_boot_id": instance_boot.c.id,
    }
    row = sa.select(*values.values()).where(boot, instance_boot.c.state == BootState.READY)
    insert = sa.insert(cohort).from_select(list(values), row.with_for_update(read=True, of=instance_boot))
    return insert.returning(cohort.c.id, cohort.c.instance_boot_id).cte("made")


def _insertion() -> sa.Select[Any]:
    """A cohort of one job, out at once: its row, its job bound to it, and what happened; how many jobs were bound."""
    made = _made()
    bound = (
        sa.update(job)
        .where(job.c.id == sa.bindparam("job_id"), job.c.cohort_id.is_(None))
        .where(~sa.exists().where(job_result.c.job_id == job.c.id))
        .values(
            cohort_id=made.c.id,
            cohort_position=0,
            predicted_cached_tokens=sa.bindparam("cached_tokens"),
            first_of_group=sa.bindparam("is_first"),
        )
        .returning(job.c.id)
        .cte("bound")
    )
    kinds = func.unnest(sa.cast(["planned", "dispatched"], ARRAY(sa.Text))).table_valued("kind").render_derived()
    event = sa.select(made.c.id, sa.literal(0), kinds.c.kind, made.c.instance_boot_id)
    event = event.select_from(sa.join(made, kinds, sa.true()))
    columns = ("cohort_id", "attempt", "kind", "instance_boot_id")
    said = sa.insert(cohort_event).from_select(columns, event).cte("said")
    how_many = sa.select(func.count()).select_from(bound).scalar_subquery()
    return sa.select(made.c.id, how_many.label("bound")).add_cte(said)


_INSERT = Frozen(_insertion())


def insert_dispatched(conn: sa.Connection, planned: Sequence[tuple[int, NewCohort]]) -> list[Message]:
    """Cohorts of one job each with the ids of the boots that they are for, written as dispatched, behind all that is
    planned. The caller commits, then publishes. A job that was bound or ended meanwhile stays out, and so does one
    whose boot is no longer ready."""
    messages = []
    for boot_id, item in planned:
        row = _INSERT.run(
            conn,
            **cohort_row(item),
            boot_id=boot_id,
            job_id=item.job_ids[0],
            cached_tokens=item.predicted_cached_tokens[0],
            is_first=item.first_of_group[0],
        ).one_or_none()
        if row is None:
            continue
        if row.bound:
            messages.append(Message(queue=item.queue, cohort_id=row.id, dispatch_no=1))
        else:
            conn.execute(sa.update(cohort).where(cohort.c.id == row.id).values(n_jobs=0, state=CohortState.DONE))
    return messages


def wake_dispatcher(conn: sa.Connection) -> None:
    """Cohorts are ready that only a pass sends out."""
    notify(conn, "dispatch")
