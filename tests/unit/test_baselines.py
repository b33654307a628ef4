"""service.core.baselines and routers: each rule as its source has it, no job lost, nothing known of the future."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefixes import RATES, backlog, instance, key_of, rungs
from traces import trace_folder

from service.core.baselines import Routed, SharedQueue
from service.core.plan import InstanceView, Limits, PlannedCohort
from service.core.policies import POLICIES, make_policy
from service.core.policy import Arrivals, Policy
from service.core.replay import replay_fleet
from service.core.routers import Affinity, ByLedger, CacheAware, LeastLoaded, PrefixHash, RoundRobin, Router
from service.core.scenario import EngineShape
from service.core.trace import read_trace

ROUTERS = [RoundRobin, LeastLoaded, Affinity, CacheAware, PrefixHash, ByLedger]
BASELINES = POLICIES[1:]
Job = tuple[list[int], int, int, int]


def fleet(n: int, **changes: object) -> list[InstanceView]:
    return [instance(queue=f"instance.{number}", boot_id=number + 1, **changes) for number in range(n)]


def arrivals(jobs: list[Job], first_id: int = 0, owner: int = 0, priority: int = 0) -> Arrivals:
    n = len(jobs)
    return Arrivals(
        jobs=backlog(jobs, first_id),
        owners=np.full(n, owner, dtype=np.int64),
        flows=np.zeros(n, dtype=np.int64),
        deadlines=np.full(n, np.inf),
        priorities=np.full(n, priority, dtype=np.int64),
    )


def taken(policy: Policy, instances: int) -> list[list[int]]:
    """Job ids in execution order by instance, taken in turn until there is nothing left."""
    runs: list[list[int]] = [[] for _ in range(instances)]
    while policy.pending_jobs:
        for number, run in enumerate(runs):
            cohort = policy.next_cohort(number, 0.0)
            run += cohort.job_ids.tolist() if cohort else []
    return runs


def placed(router: Router, jobs: list[Job], instances: list[InstanceView]) -> list[int]:
    """The instance of each job, all added at once."""
    policy = Routed(router)
    policy.set_instances(instances, 0.0)
    policy.add(arrivals(jobs), 0.0)
    where = {job_id: number for number, run in enumerate(taken(policy, len(instances))) for job_id in run}
    return [where[number] for number in range(len(jobs))]


def test_round_robin_goes_in_turn() -> None:
    assert placed(RoundRobin(), [([], 5, 1, 1)] * 7, fleet(3)) == [0, 1, 2, 0, 1, 2, 0]


def test_least_loaded_goes_where_least_work_is() -> None:
    jobs: list[Job] = [([], 30, 1, 1), ([], 10, 1, 1), ([], 10, 1, 1), ([], 15, 1, 1)]
    assert placed(LeastLoaded(), jobs, fleet(2)) == [0, 1, 1, 1]


def test_affinity_follows_the_longest_match() -> None:
    jobs: list[Job] = [([1] * 8, 4, 1, 1), ([2] * 8, 4, 1, 1), ([2] * 8, 4, 1, 1), ([1] * 8, 9, 1, 1)]
    assert placed(Affinity(), jobs, fleet(2)) == [0, 1, 1, 0]


def test_affinity_leaves_an_instance_that_is_a_job_above_the_mean() -> None:
    # 1 s of decoding each, the first 3.21 s of prefill too. Instance 0 may have at most 1.05 / 2 of its own work
    # and the biggest job, 4.21 s: that is 8.86 s, and before the sixth job it has 4.21 + 4 x 1.01 s, then 9.26 s.
    where = placed(Affinity(), [([1] * 100, 10, 500, 1)] * 7, fleet(2))
    assert where == [0] * 6 + [1]


def test_affinity_forgets_what_an_instance_no_longer_holds() -> None:
    jobs: list[Job] = [([1] * 8, 1, 1, 1), ([1] * 8, 1, 1, 1), ([2] * 8, 1, 1, 1), ([1] * 8, 1, 1, 1)]
    policy = Routed(Affinity())
    policy.set_instances(fleet(1, kv_capacity_tokens=320, max_num_seqs=16), 0.0)
    policy.add(arrivals(jobs), 0.0)
    cohort = policy.next_cohort(0, 0.0)
    assert cohort is not None
    # Of the first prompt's 256 tokens, 320 less the third job's 258 are left, in whole rungs.
    assert cohort.predicted_cached_tokens.tolist() == [0, 256, 0, 32]
    assert cohort.first_of_group.tolist() == [True, False, True, True]


def test_cache_aware_follows_more_than_half_a_match() -> None:
    half: Job = ([1, 1, 1, 7, 7, 7], 0, 1, 1)
    more: Job = ([1, 1, 1, 1, 7, 7], 0, 1, 1)
    first: list[Job] = [([1] * 6, 0, 1, 1), ([9], 0, 1, 1), ([9], 0, 1, 1)]
    # Of four jobs placed, instance 0 has one and instance 1 two: the shortest queue is 0 again.
    assert placed(CacheAware(), [*first, more], fleet(2)) == [0, 1, 1, 0]
    busy: list[Job] = [*first[:1], ([1] * 6, 0, 1, 1)]
    assert placed(CacheAware(), [*busy, half], fleet(2)) == [0, 0, 1]
    assert placed(CacheAware(), [*busy, more], fleet(2)) == [0, 0, 0]


def test_cache_aware_takes_the_shortest_queue_where_loads_are_apart() -> None:
    where = placed(CacheAware(), [([1] * 6, 0, 1, 1)] * 35, fleet(2))
    # 33 apart is more than 32 (and than 1.1 times nothing); then both match in full, and the first is taken again.
    assert where == [0] * 33 + [1, 0]


def test_prefix_hash_sends_a_prefix_to_one_instance_within_its_bound() -> None:
    where = placed(PrefixHash(), [([5] * 8, 1, 1, 1)] * 100, fleet(4))
    counts = np.bincount(where, minlength=4)
    # An instance is passed over once it has more than 1.25 x the mean with the new job.
    assert counts.max() <= 1.25 * 100 / 4 + 1
    assert counts.argmax() == where[0]


def test_prefix_hash_looks_no_further_than_its_prefix() -> None:
    alike = [placed(PrefixHash(prefix_length=64), [([3, 4, tail], 1, 1, 1)], fleet(8))[0] for tail in range(20)]
    assert len(set(alike)) == 1
    apart = [placed(PrefixHash(prefix_length=96), [([3, 4, tail], 1, 1, 1)], fleet(8))[0] for tail in range(20)]
    assert len(set(apart)) > 2


def test_prefix_hash_moves_few_prefixes_when_an_instance_goes() -> None:
    five = fleet(5)
    four = [five[0], five[1], five[3], five[4]]
    old = [placed(PrefixHash(), [([prefix], 1, 1, 1)], five)[0] for prefix in range(200)]
    new = [placed(PrefixHash(), [([prefix], 1, 1, 1)], four)[0] for prefix in range(200)]
    assert all(five[before] is four[after] for before, after in zip(old, new, strict=True) if before != 2)


def test_prefix_hash_with_a_threshold_leaves_only_who_has_that_many() -> None:
    where = placed(PrefixHash(concurrency_threshold=10), [([5] * 8, 1, 1, 1)] * 16, fleet(2))
    home = where[0]
    assert where == [home] * 10 + [1 - home] * 6


def test_the_shared_queue_gives_cohorts_in_key_order_to_whoever_asks() -> None:
    policy = SharedQueue()
    policy.set_instances(fleet(2, max_num_seqs=4), 0.0)
    policy.add(arrivals([([prefix % 5, prefix], 1, 1, 1) for prefix in range(30)]), 0.0)
    keys, owners = [], []
    for turn in range(100):
        cohort = policy.next_cohort(turn % 2, 0.0)
        if cohort is None:
            break
        owners.append(turn % 2)
        keys += [cohort.first_key, cohort.last_key]
    assert keys == sorted(keys)
    assert len(owners) > 4


def test_a_job_that_only_the_larger_cache_holds_goes_there() -> None:
    instances = [instance(queue="a", kv_capacity_tokens=64), instance(queue="b", kv_capacity_tokens=1000)]
    jobs: list[Job] = [([1] * 8, 1, 1, 1), ([2], 1, 1, 1), ([3] * 40, 1, 1, 1)]
    for name in BASELINES:
        policy = make_policy(name)
        policy.set_instances(instances, 0.0)
        policy.add(arrivals(jobs), 0.0)
        runs = taken(policy, 2)
        assert 0 in runs[1], name
        assert sorted(runs[0] + runs[1]) == [0, 1, 2]  # the last fits nobody, and is given out to be refused


def test_a_higher_class_goes_first_even_late() -> None:
    for name in BASELINES:
        policy = make_policy(name)
        policy.set_instances(fleet(1, max_num_seqs=4), 0.0)
        policy.add(arrivals([([n], 1, 1, 1) for n in range(100)]), 0.0)
        assert policy.next_cohort(0, 0.0) is not None
        policy.add(arrivals([([200], 1, 1, 1)], first_id=1000, priority=2), 0.0)
        cohort = policy.next_cohort(0, 0.0)
        assert cohort is not None
        assert cohort.job_ids.tolist() == [1000], name


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no policy 'x'; there are prefix, round_robin.*shared_queue"):
        make_policy("x")


many_jobs = st.lists(st.tuples(rungs, st.integers(1, 31), st.integers(1, 40), st.integers(1, 3000)), max_size=15)
events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), many_jobs, st.integers(0, 2)),
        st.tuples(st.just("take"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("drop"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("fleet"), st.integers(0, 4), st.integers(0, 1)),
    ),
    max_size=20,
)


def check_cohort(cohort: PlannedCohort, known: dict[int, Job], limits: Limits, asked: int) -> None:
    jobs = [known[job_id] for job_id in cohort.job_ids.tolist()]
    prompts = [32 * len(path) + extra for path, extra, _, _ in jobs]
    assert cohort.instance == asked
    assert cohort.body_bytes == sum(size for _, _, _, size in jobs)
    assert cohort.body_bytes <= limits.cohort_bytes or len(jobs) == 1
    assert cohort.prompt_tokens == sum(prompts)
    assert (cohort.first_key, cohort.last_key) == (key_of(jobs[0][0]), key_of(jobs[-1][0]))
    assert (cohort.predicted_cached_tokens >= 0).all()
    assert (cohort.predicted_cached_tokens < prompts).all()
    assert cohort.estimated_seconds > 0


@pytest.mark.parametrize("name", BASELINES)
@given(events=events)
def test_every_job_is_given_out_once_whatever_happens(name: str, events: list[tuple[str, object, int]]) -> None:
    limits = Limits(cohort_bytes=4000)
    policy, size = make_policy(name, limits), 0
    known: dict[int, Job] = {}
    owners: dict[int, int] = {}
    pending: set[int] = set()
    for kind, value, number in [*events, ("fleet", 2, 0)]:
        if kind == "add":
            jobs = list(value)  # type: ignore[call-overload]
            ids = range(len(known), len(known) + len(jobs))
            policy.add(arrivals(jobs, len(known), number), 0.0)
            known |= dict(zip(ids, jobs, strict=True))
            owners |= dict.fromkeys(ids, number)
            pending |= set(ids)
        elif kind == "drop":
            policy.drop(int(value))  # type: ignore[call-overload]
            pending -= {job_id for job_id in pending if owners[job_id] == value}
        elif kind == "fleet":
            size = int(value)  # type: ignore[call-overload]
            views = [instance(queue=f"q{n}", boot_id=number if n else 0) for n in range(size)]
            policy.set_instances(views, 0.0)
        elif size:
            asked = int(value) % size  # type: ignore[call-overload]
            cohort = policy.next_cohort(asked, 0.0)
            if cohort is not None:
                check_cohort(cohort, known, limits, asked)
                assert set(cohort.job_ids.tolist()) <= pending
                pending -= set(cohort.job_ids.tolist())
        assert policy.pending_jobs == len(pending)
    assert sorted(job_id for run in taken(policy, 2) for job_id in run) == sorted(pending)


@pytest.mark.parametrize("router", ROUTERS)
@given(jobs=many_jobs, later=many_jobs)
def test_no_router_knows_the_future(router: type, jobs: list[Job], later: list[Job]) -> None:
    assert placed(router(), jobs + later, fleet(3))[: len(jobs)] == placed(router(), jobs, fleet(3))


@pytest.mark.parametrize("router", ROUTERS)
def test_loads_from_outside_count(router: type) -> None:
    """An instance that is far behind with what it took gets nothing, where its router looks at loads at all."""
    policy = Routed(router())
    policy.set_instances(fleet(2), 0.0)
    policy.set_loads([1000.0, 0.0], [1000, 0])
    policy.add(arrivals([([1] * 4, 1, 1, 1)] * 6), 0.0)
    assert (len(taken(policy, 2)[0]) > 0) == (router is RoundRobin)


def test_the_rates_of_a_known_fleet_may_change_without_moving_a_job() -> None:
    policy = Routed(RoundRobin())
    policy.set_instances(fleet(2), 0.0)
    policy.add(arrivals([([], 5, 1, 1)] * 3), 0.0)
    policy.set_instances(fleet(2, rates=RATES, max_num_seqs=8), 1.0)
    assert taken(policy, 2) == [[0, 2], [1]]


CONVERSATION = "conversation_trace.jsonl"


@pytest.mark.parametrize(("name", "hit_rate"), [("round_robin", 0.077), ("affinity", 0.228)])
def test_the_published_figures_are_met(name: str, hit_rate: float) -> None:
    """DESIGN.md section 6: 8 engines, 1e6 tokens each, the whole conversation trace known at the start."""
    with (trace_folder() / CONVERSATION).open("rb") as lines:
        jobs = read_trace(lines).at_once()
    shapes = [EngineShape(block_size=512, kv_capacity_tokens=1_000_000)] * 8
    result = replay_fleet(jobs, make_policy(name), shapes)
    assert result.hit_rate == pytest.approx(hit_rate, rel=0.1)
