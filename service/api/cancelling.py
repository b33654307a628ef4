"""The one way in which a single job is cancelled: by its owner, or because the client that waited for it went away."""

from __future__ import annotations

from service.api.context import Context
from service.store import singles
from service.store.singles import Single
from service.store.tenants import Tenant


def cancel(context: Context, tenant: Tenant, job_id: str) -> Single | None:
    """Ask that the job end as cancelled; the job as it then is. None: it has ended, or is not this tenant's."""
    with context.database.transaction() as conn:
        job = singles.get_single(conn, tenant.id, job_id)
        if job is None or job.is_terminal or not singles.request_cancel(conn, job):
            return None
        job = singles.get_single(conn, tenant.id, job_id) or job  # it may have been sent out meanwhile
    if job.instance is not None:  # the mark would be found with the next heartbeat, this is heard at once
        context.relay.signal_cancel(job.instance, job.id)
    return job
