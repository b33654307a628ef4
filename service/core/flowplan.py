"""One tenant's backlog and the plan in force for it. DESIGN.md section 6, steps 1 to 8.

The whole backlog (or a window of it) is planned at once, and stays in memory as runs of pieces; cohorts are taken from
the heads. A new plan is made when what came since exceeds a fifth of what waits, when the fleet changes, and, where
deadlines are tight, as work proceeds. In between a late arrival joins the run that shares most with it, and an
instance that runs dry takes the tail of another: neither looks at the rest of the backlog.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import numpy as np

from service.core import cut, plan, steal
from service.core.pending import Pending
from service.core.phases import keep_more, met_first_come, split_phases
from service.core.plan import InstanceView, Limits, PlannedCohort
from service.core.policy import Arrivals
from service.core.prefix import (
    IntArray,
    cacheable_tokens,
    prefix_groups,
    shared_tokens,
    shares_group,
    sort_order,
)
from service.core.recent import Recent
from service.core.runs import Piece, Runs, most_shared, place_in

_REPLAN_SHARE = 0.2  # of what waits: more than that came since the plan was made
_NEW_SHARE = 0.4  # of a plan: more than that (as in every window) is new since long answers were put first: again
_TIGHT_SHARE = 0.05  # of what was planned is done, where deadlines are tight
_PAUSE_SECONDS_PER_JOB = 2e-5  # between two plans: three times what planning takes, so most of the time is for feeding
_GUIDED_SHARE = 0.5  # of an even share of what is left: the most that one cohort takes
_KIN_SHARE = 0.5  # of a prompt: what shares less with anything is of no group, and waits at a tail for its own to come
_JOIN_SLACK = 0.03  # of the mean load: an instance may be so much above it, since tails can be stolen
_PACK_ABOVE = 4096  # slots: below that there is no memory to win


@dataclasses.dataclass(slots=True, kw_only=True)
class Fleet:
    """What all flows see of the instances. The driver's, changed in place."""

    views: list[InstanceView] = dataclasses.field(default_factory=list)
    out_seconds: list[float] = dataclasses.field(default_factory=list)  # estimated, of what was taken and is not done


class FlowPlan:
    """`servers` in calls: instances' worth of this flow's estimated work that is done per second."""

    def __init__(self, limits: Limits, window_jobs: int | None, fleet: Fleet) -> None:
        self._limits = limits
        self._window_jobs = window_jobs
        self._fleet = fleet
        self._pending = Pending()
        self._runs = Runs(len(fleet.views))
        self._held: list[bytes | None] = [view.held_key for view in fleet.views]  # key taken last, by instance
        self._recent = Recent(len(fleet.views))  # taken by each
        self._planned = 0  # jobs in runs
        self._came = 0  # jobs since the plan was made, in runs or not
        self._new = 0  # jobs planned for the first time since long answers were put first
        self._planned_then = 0
        self._planned_at = -np.inf
        self._is_stale = False  # the fleet is another
        self._is_tight = False  # a deadline decides the order
        self._earliest = np.inf  # deadline that is not past

    @property
    def count(self) -> int:
        """Jobs that wait."""
        return self._pending.count

    @property
    def seconds(self) -> float:
        """Estimated, of the jobs in runs."""
        return sum(self._runs.seconds)

    def add(self, arrivals: Arrivals, now_seconds: float, servers: float) -> None:
        """Jobs come: many wait for the next plan, few join the present one."""
        before = self._planned
        slots = self._pending.extend(arrivals)
        self._came += len(slots)
        self._earliest = min(self._earliest, _earliest_after(now_seconds, arrivals.deadlines))
        is_full = self._window_jobs is not None and self._pending.count > self._window_jobs
        if is_full or self._came > _REPLAN_SHARE * before:
            return
        for slot in slots:
            self._join(slot, now_seconds, servers)

    def drop(self, owner: int) -> None:
        """Forget an owner's jobs."""
        if not self._pending.drop(owner):
            return
        kept = Runs(len(self._fleet.views))
        self._planned = 0
        for piece in self._runs:
            slots = self._pending.alive(piece.slots)
            if slots:
                seconds = piece.seconds * len(slots) / len(piece.slots)
                first_key = self._pending.keys[slots[0]]
                left = Piece(slots, first_key=first_key, seconds=seconds, begins_group=piece.begins_group)
                kept.append(piece.instance, left)
                self._planned += len(slots)
        self._runs = kept
        self._runs.renumber(self._pending.pack())

    def change_fleet(self, origins: Sequence[int | None]) -> None:
        """The fleet was changed: for each instance now, its index before, None for a new one. Runs whose instance is
        gone go to those with the least work, until the next plan."""
        old, held = self._runs, self._held
        self._runs = Runs(len(origins))
        self._held = [
            view.held_key if origin is None else held[origin]
            for origin, view in zip(origins, self._fleet.views, strict=True)
        ]
        index = {origin: number for number, origin in enumerate(origins) if origin is not None}
        if not origins:
            self._planned = 0
        for piece in old if origins else ():
            target = index.get(piece.instance)
            if target is None:
                target = self._roomiest(self._needed_tokens(piece.slots), self._runs.seconds)
            self._runs.append(target, piece)
        self._recent.change_fleet(origins)
        self._is_stale = True

    def take(self, instance: int) -> PlannedCohort | None:
        """The next cohort of an instance: of its own run, or the tail of another's."""
        piece = self._runs.pop_head(instance) or self._stolen(instance)
        if piece is None:
            return None
        backlog = self._pending.backlog(np.array(piece.slots, dtype=np.int64))
        view = dataclasses.replace(self._fleet.views[instance], held_key=self._before(instance, backlog.keys[0]))
        shared, cached = plan.follow(backlog.keys, backlog.prompt_tokens, view)
        prompts = backlog.prompt_tokens
        first = ~shares_group(shared, prompts, np.concatenate((prompts[:1], prompts[:-1])))
        self._recent.recall(instance, backlog.keys, prompts, cached, first, view.block_size)
        seconds = plan.estimated_seconds(cached, prompts, backlog.output_tokens, view)
        n = self._fitting(seconds, backlog.body_bytes, view.max_num_seqs)
        if n < len(piece.slots):
            rest = Piece(piece.slots[n:], first_key=backlog.keys[n], seconds=float(seconds[n:].sum()))
            rest.begins_group = bool(first[n])
            self._runs.append_head(instance, rest)
        first[0] &= piece.begins_group
        self._held[instance] = backlog.keys[n - 1]
        new_tokens = (prompts - cached + backlog.output_tokens).tolist()
        for key, tokens in zip(backlog.keys[:n], new_tokens, strict=False):
            self._recent.add(instance, key, tokens, view.kv_capacity_tokens)
        slots = piece.slots[:n]
        cohort = PlannedCohort(
            instance=instance,
            job_ids=self._pending.column("job_ids", slots),
            predicted_cached_tokens=cached[:n],
            first_of_group=first[:n],
            estimated_seconds=float(seconds[:n].sum()),
            body_bytes=int(backlog.body_bytes[:n].sum()),
            prompt_tokens=int(prompts[:n].sum()),
            first_key=backlog.keys[0],
            last_key=backlog.keys[n - 1],
        )
        self._pending.take(slots)
        self._planned -= n
        if len(self._pending) > _PACK_ABOVE and 2 * self._pending.count < len(self._pending):
            self._runs.renumber(self._pending.pack())
        return cohort

    def _before(self, instance: int, key: bytes) -> bytes | None:
        """What an instance has run that a job with this key finds most of: taken last, or not long ago (before a steal,
        or another tenant's turn)."""
        held, recent = self._held[instance], self._recent.best_on(instance, key)
        if held is None or recent is None:
            return held or recent
        return max(held, recent, key=lambda before: shared_tokens(before, key))

    def _fitting(self, seconds: cut.FloatArray, body_bytes: IntArray, max_num_seqs: int) -> int:
        """How many of the jobs, from the first, one cohort takes: late arrivals may have made the piece too large, and
        near the end pieces shrink with what is left (guided self-scheduling, Polychronopoulos and Kuck 1987), since
        what was taken cannot be stolen."""
        n = int(np.searchsorted(np.cumsum(body_bytes), self._limits.cohort_bytes, side="right"))
        even = (self.seconds + float(seconds.sum())) / len(self._fleet.views)
        guided = int(np.searchsorted(np.cumsum(seconds), _GUIDED_SHARE * even, side="right"))
        return max(min(n, self._limits.cohort_jobs, max(guided, max_num_seqs // 16)), 1)

    def is_due(self, now_seconds: float, servers: float) -> bool:
        """A new plan should be made before more is taken."""
        waiting = self._pending.count
        if not waiting or not self._fleet.views:
            return False
        if not self._planned:
            return True
        if now_seconds < self._planned_at + _PAUSE_SECONDS_PER_JOB * self._planned_then:
            return False
        beyond = waiting - self._planned
        if self._window_jobs is not None and beyond:
            is_refill = 2 * self._planned <= self._window_jobs
            if is_refill:
                return True
        elif self._came > _REPLAN_SHARE * waiting:
            return True
        self._is_tight = self._is_tight or now_seconds + self.seconds / servers > self._earliest
        done = self._planned_then - self._planned
        return self._is_stale or (self._is_tight and done > _TIGHT_SHARE * self._planned_then)

    def replan(self, now_seconds: float, servers: float, lanes: Sequence[int]) -> None:
        """Runs for the instances `lanes`, made anew from all that waits, or from a window of it: the earliest
        deadlines, then the first come."""
        self._pending.pack()
        slots = self._pending.alive_slots()
        deadlines = self._pending.deadlines(slots)
        self._earliest = _earliest_after(now_seconds, deadlines)
        if self._window_jobs is not None and len(slots) > self._window_jobs:
            slots = np.sort(slots[np.argsort(deadlines, kind="stable")[: self._window_jobs]])
        self._runs = Runs(len(self._fleet.views))
        phases = self._phases(slots, now_seconds, servers)
        self._new += len(slots) - self._planned
        # Not in every plan: each would part other groups for it.
        long_first = len(self._fleet.views) > 1 and self._new > _NEW_SHARE * len(slots)
        self._new = 0 if long_first else self._new
        held = list(self._held)
        for phase in phases:
            views = [
                dataclasses.replace(
                    self._fleet.views[lane],
                    held_key=held[lane],
                    load_seconds=self._fleet.out_seconds[lane] + self._runs.seconds[lane],
                )
                for lane in lanes
            ]
            backlog = self._pending.backlog(phase)
            for cohort in plan.plan(backlog, views, self._limits, long_answers_first=long_first):
                piece = Piece(cohort.job_ids.tolist(), first_key=cohort.first_key, seconds=cohort.estimated_seconds)
                piece.begins_group = bool(cohort.first_of_group[0])
                self._runs.append(lanes[cohort.instance], piece)
                held[lanes[cohort.instance]] = cohort.last_key
        self._planned = self._planned_then = len(slots)
        self._planned_at, self._came = now_seconds, 0
        self._is_stale, self._is_tight = False, len(phases) > 1

    def _phases(self, slots: IntArray, now_seconds: float, servers: float) -> list[IntArray]:
        """The slots in one phase, or in several where deadlines ask for it."""
        deadlines = self._pending.deadlines(slots)
        if not np.isfinite(deadlines).any():
            return [slots]
        backlog = self._pending.backlog(slots)
        order = sort_order(backlog.keys, backlog.prompt_tokens)
        keys = [backlog.keys[place] for place in order.tolist()]
        prompts = backlog.prompt_tokens[order]
        seconds = self._fleet_seconds(keys, prompts, backlog.output_tokens[order])
        start = now_seconds + sum(self._fleet.out_seconds) / len(self._fleet.views)
        slack = min(self._limits.cohort_seconds, float(seconds.sum()) / servers / self._limits.cohort_share)
        parts = split_phases(
            seconds=seconds,
            due=self._due(slots[order], seconds, start, servers, slack),
            groups=prefix_groups(keys, prompts),
            now_seconds=start,
            servers=servers,
            slack_seconds=slack,
        )
        return [slots[order[part]] for part in parts]

    def _fleet_seconds(self, keys: Sequence[bytes], prompts: IntArray, outputs: IntArray) -> cut.FloatArray:
        """float64[n]: cost of each job, in key order, on an instance that is as fast as the mean of those that can run
        it; 0 where none can."""
        views = self._fleet.views
        kinds = Counter(dataclasses.replace(view, queue="", held_key=None, load_seconds=0, boot_id=0) for view in views)
        per_second = np.zeros(len(keys))
        for view, n in kinds.items():
            _, cached = plan.follow(keys, prompts, view)
            seconds = plan.estimated_seconds(cached, prompts, outputs, view)
            per_second += n * np.divide(1, seconds, out=np.zeros(len(keys)), where=seconds > 0)
        return np.divide(len(views), per_second, out=np.zeros(len(keys)), where=per_second > 0)

    def _due(
        self, slots: IntArray, seconds: cut.FloatArray, start_seconds: float, servers: float, slack_seconds: float
    ) -> cut.FloatArray:
        """The deadlines to keep, inf for the others: of jobs planned for the first time, those that first come, first
        served would meet, or miss by so little that estimates cannot tell: given up, they would end last of all.
        Arrays in key order."""
        due, deadlines = self._pending.due(slots), self._pending.deadlines(slots)
        fresh = np.isnan(due)
        if fresh.any():
            met = met_first_come(
                seconds=seconds,
                deadlines=deadlines + slack_seconds,
                arrivals=slots,
                now_seconds=start_seconds,
                servers=servers,
            )
            due[fresh] = np.where(met & (deadlines > start_seconds), deadlines, np.inf)[fresh]
        due = keep_more(seconds=seconds, due=due, deadlines=deadlines, now_seconds=start_seconds, servers=servers)
        self._pending.set_due(slots, due)
        return due

    def _stolen(self, thief: int) -> Piece | None:
        """The tail of the run with most work left, or half of it, where that ends sooner than it would at home."""
        loads = [self._load(number, thief) for number in range(len(self._fleet.views))]
        wish = steal.steal_from(loads, thief)
        if wish is None:
            return None
        piece = self._runs.pop_tail(wish.victim)
        if not wish.halve:
            return piece
        backlog = self._pending.backlog(np.array(piece.slots, dtype=np.int64))
        shared, cached = plan.follow(backlog.keys, backlog.prompt_tokens, self._fleet.views[wish.victim])
        seconds = plan.estimated_seconds(
            cached, backlog.prompt_tokens, backlog.output_tokens, self._fleet.views[wish.victim]
        )
        at = steal.halve(seconds, shared)
        kept = Piece(piece.slots[:at], first_key=backlog.keys[0], seconds=float(seconds[:at].sum()))
        kept.begins_group = piece.begins_group
        self._runs.append(wish.victim, kept)
        return Piece(piece.slots[at:], first_key=backlog.keys[at], seconds=float(seconds[at:].sum()))

    def _load(self, number: int, thief: int) -> steal.InstanceLoad:
        lane = self._runs.lane(number)
        capacity, at_home = (self._fleet.views[n].kv_capacity_tokens for n in (thief, number))
        fits = bool(lane) and (capacity >= at_home or self._needed_tokens(lane[-1].slots) <= capacity)
        return steal.InstanceLoad(
            seconds_left=self._runs.seconds[number] + self._fleet.out_seconds[number],
            stealable_cohorts=len(lane) if fits else 0,
            tail_seconds=lane[-1].seconds if lane else 0.0,
            tail_jobs=len(lane[-1].slots) if lane else 0,
            tail_cold_seconds=self._cold_seconds(lane[-1], thief) if lane and number != thief else 0.0,
        )

    def _cold_seconds(self, piece: Piece, thief: int) -> float:
        """What the thief computes anew of a piece: what its jobs share, less what the thief holds."""
        keys, view = self._pending.keys, self._fleet.views[thief]
        first, last, held = keys[piece.slots[0]], keys[piece.slots[-1]], self._held[thief]
        lacking = shared_tokens(first, last) - (0 if held is None else shared_tokens(first, held))
        return max(lacking, 0) / view.rates.prefill_tokens_per_second

    def _join(self, slot: int, now_seconds: float, servers: float) -> None:
        """A late arrival joins the run that shares most with it, at its place in key order, or goes to the head where
        an instance has just run what it shares; unless that instance has more work above the mean than sharing saves.
        One without kin goes to a tail; one that is due before all is done to the head."""
        keys, prompt = self._pending.keys, self._pending.prompt_tokens(slot)
        key = keys[slot]
        loads = [run + out for run, out in zip(self._runs.seconds, self._fleet.out_seconds, strict=True)]
        best, target, piece, place = 0, -1, None, 0
        for candidate in self._runs.neighbours(key):
            at = place_in(candidate, keys, key)
            tokens = most_shared(candidate, at, keys, key)
            if piece is None or tokens > best:
                best, target, piece, place = tokens, candidate.instance, candidate, at
        for number, held in enumerate(self._held):
            tokens = shared_tokens(held, key) if held is not None else 0
            if tokens > best:
                best, target, piece = tokens, number, None
        tokens, number = self._recent.longest_match(key)
        if tokens > best:
            best, target, piece = tokens, number, None
        deadline = float(self._pending.deadlines([slot])[0])
        is_urgent = now_seconds < deadline < now_seconds + self.seconds / servers
        needed = self._needed_tokens([slot])
        is_kin = target >= 0 and best >= _KIN_SHARE * prompt and needed <= self._fleet.views[target].kv_capacity_tokens
        if not is_kin or self._is_overloaded(target, best, loads):
            best, target, piece = 0, self._roomiest(needed, loads), None
        view = self._fleet.views[target]
        cached = cacheable_tokens(best, prompt, view.block_size)
        seconds = self._job_seconds(slot, cached, view)
        self._planned += 1
        self._new += 1
        if piece is not None and not is_urgent:
            self._runs.insert(piece, place, slot, key, seconds)
            return
        alone = Piece([slot], first_key=key, seconds=seconds, begins_group=2 * best < prompt)
        add = self._runs.append_head if best or is_urgent else self._runs.append
        add(target, alone)

    def _needed_tokens(self, slots: Sequence[int] | IntArray) -> int:
        """What the largest of some jobs needs of a cache: its prompt and its answer."""
        prompts, outputs = self._pending.column("prompt_tokens", slots), self._pending.column("output_tokens", slots)
        return int((prompts + outputs).max())

    def _roomiest(self, needed_tokens: int, loads: Sequence[float]) -> int:
        """The instance with the least work among those whose cache is large enough, or else largest."""
        capacities = [view.kv_capacity_tokens for view in self._fleet.views]
        enough = min(needed_tokens, max(capacities))
        return min((n for n, has in enumerate(capacities) if has >= enough), key=loads.__getitem__)

    def _is_overloaded(self, number: int, shared: int, loads: Sequence[float]) -> bool:
        saved_seconds = shared / self._fleet.views[number].rates.prefill_tokens_per_second
        return loads[number] > (1 + _JOIN_SLACK) * sum(loads) / len(loads) + saved_seconds

    def _job_seconds(self, slot: int, cached_tokens: int, view: InstanceView) -> float:
        cached = np.array([cached_tokens], dtype=np.int64)
        prompts, outputs = self._pending.column("prompt_tokens", [slot]), self._pending.column("output_tokens", [slot])
        return float(plan.estimated_seconds(cached, prompts, outputs, view)[0])


def _earliest_after(now_seconds: float, deadlines: cut.FloatArray) -> float:
    """The next deadline, inf for none: one that is past is no reason for another plan."""
    return float(deadlines[deadlines > now_seconds].min(initial=np.inf))
