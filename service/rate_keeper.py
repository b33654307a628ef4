"""Keeps the rates of the boots: fitted from what they finished, lent to those that have not finished enough."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from service.core.fit import MIN_JOBS, fit
from service.core.plan import Rates
from service.store import instances, rates
from service.store.instances import Boot
from service.store.session import Database

log = logging.getLogger(__name__)

_INTERVAL_SECONDS = 10.0
_RESULTS = 2_000  # newest, that a fit rests on: at 32 sequences within a tenth of the truth, and 40 ms of work
_NEW_RESULTS = 100  # that make another fit worth while
_WORTH_WRITING = 0.05  # relative change: a rate that differs by less moves no cut, and would only unsettle the plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Rated:
    """A boot whose rates were written."""

    boot_id: int
    rates: Rates


@dataclass(slots=True, kw_only=True)
class _Memory:
    """Of one boot: up to which transaction its results were used, and when it was last looked at."""

    recorded_xid: int = 0
    looked_at_seconds: float = -math.inf


class RateKeeper:
    """Called by whoever leads, on every pass. Remembers nothing that matters: the boots' rows hold the rates."""

    def __init__(self) -> None:
        self._memories: dict[int, _Memory] = {}

    def refit_due(self, database: Database, boots: Sequence[Boot], now_seconds: float) -> list[Rated]:
        """Look at the boot that was not looked at for longest, if that is 10 s ago, and lend to those without rates.

        One boot a call, so that a pass is never held up by more than one fit. `now_seconds` on any clock that only
        goes forward. Returns the boots whose rows say something else now.
        """
        self._memories = {boot.id: self._memories.get(boot.id, _Memory()) for boot in boots}
        due = [boot for boot in boots if now_seconds - self._memories[boot.id].looked_at_seconds >= _INTERVAL_SECONDS]
        if not due:
            return []
        boot = min(due, key=lambda boot: self._memories[boot.id].looked_at_seconds)
        self._memories[boot.id].looked_at_seconds = now_seconds
        refitted = self._refit(database, boot)
        written = {} if refitted is None or not _differs(refitted, boot) else {boot.id: refitted}
        written |= _lent(boots, written)
        if written:
            database.run(lambda conn: _write(conn, written))
        for boot_id, found in written.items():
            log.info(
                "boot=%d rated: prefill %.0f, decode %.0f tokens a second",
                boot_id,
                found.prefill_tokens_per_second,
                found.decode_tokens_per_second,
            )
        return [Rated(boot_id=boot_id, rates=found) for boot_id, found in written.items()]

    def _refit(self, database: Database, boot: Boot) -> Rates | None:
        """The boot's rates, where it has new results enough and they can be fitted."""
        memory = self._memories[boot.id]
        wanted = _NEW_RESULTS if memory.recorded_xid else MIN_JOBS
        with database.transaction() as conn:
            if rates.results_after(conn, boot.id, memory.recorded_xid, wanted) < wanted:
                return None
            memory.recorded_xid = rates.recorded_up_to(conn, boot.id)
            run = rates.read_run(
                conn,
                boot.id,
                max_num_seqs=boot.max_num_seqs,
                jobs_in_flight=boot.running_jobs + boot.waiting_jobs,
                limit=_RESULTS,
            )
        found = fit([run], is_judged=False)
        return None if found is None else found.rates


def _differs(found: Rates, boot: Boot) -> bool:
    pairs = (
        (found.prefill_tokens_per_second, boot.prefill_tokens_per_second),
        (found.decode_tokens_per_second, boot.decode_tokens_per_second),
    )
    return any(not old or abs(math.log(new / old)) > _WORTH_WRITING for new, old in pairs)


def _lent(boots: Sequence[Boot], written: dict[int, Rates]) -> dict[int, Rates]:
    """For boots without rates those of a boot of the same model, of the same engine where there is one.

    A plan that takes one engine by its results and its twin by a guess would give one of them nearly everything.
    """
    known = {boot.id: found for boot in boots if (found := written.get(boot.id) or _rates(boot)) is not None}
    lent = {}
    for boot in boots:
        others = [other for other in boots if other.id in known and other.model == boot.model]
        if boot.id not in known and others:
            others.sort(key=lambda other: (other.engine != boot.engine, known[other.id].prefill_tokens_per_second))
            alike = [other for other in others if other.engine == others[0].engine]
            lent[boot.id] = known[alike[len(alike) // 2].id]
    return lent


def _rates(boot: Boot) -> Rates | None:
    if not boot.prefill_tokens_per_second or not boot.decode_tokens_per_second:
        return None
    return Rates(
        prefill_tokens_per_second=boot.prefill_tokens_per_second,
        decode_tokens_per_second=boot.decode_tokens_per_second,
    )


def _write(conn: sa.Connection, written: dict[int, Rates]) -> None:
    for boot_id, found in sorted(written.items()):
        instances.set_rates(conn, boot_id, found.prefill_tokens_per_second, found.decode_tokens_per_second)
