"""How long the answers of a batch are, against what intake predicted, from the newest of its finished jobs."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY

from service.core import fit
from service.core.model import Outcome
from service.store.tables import job, job_result

_NEWEST = 256  # results of a batch: the sums of batch_progress know no prediction, and these are the same jobs' both


def output_scale(conn: sa.Connection, batch_ids: Sequence[str]) -> dict[str, float]:
    """What to multiply the predicted output tokens of each batch's jobs by (core.fit.output_scale); 1 for a batch
    that has finished none. Reads 256 results and jobs of each by their indexes, however large it is."""
    scales = dict.fromkeys(batch_ids, 1.0)
    if not batch_ids:
        return scales
    wanted = sa.func.unnest(sa.cast(list(batch_ids), ARRAY(sa.Text))).table_valued("id", name="wanted").render_derived()
    newest = (
        sa.select(job_result.c.job_id, job_result.c.outcome, job_result.c.completion_tokens)
        .where(job_result.c.batch_id == wanted.c.id)
        .order_by(job_result.c.recorded_xid.desc(), job_result.c.job_id.desc())
        .limit(_NEWEST)
        .lateral("newest")
    )
    rows = conn.execute(
        sa.select(
            wanted.c.id,
            sa.func.count().label("jobs"),
            sa.func.sum(job.c.predicted_output_tokens).label("predicted"),
            sa.func.sum(newest.c.completion_tokens).label("made"),
        )
        .select_from(wanted.join(newest, sa.true()).join(job, job.c.id == newest.c.job_id))
        .where(newest.c.outcome == Outcome.SUCCEEDED, newest.c.completion_tokens.is_not(None))
        .group_by(wanted.c.id)
    )
    for row in rows:
        predicted, made = float(row.predicted), float(row.made)
        scales[row.id] = fit.output_scale(predicted_tokens=predicted, completion_tokens=made, jobs=row.jobs)
    return scales
