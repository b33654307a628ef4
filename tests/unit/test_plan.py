"""service.core.plan: every job once, in key order, replicating no more than the cuts must."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefixes import RATES, backlog, instance, instances, jobs, key_of, reordered

from service.core import prefix
from service.core.plan import (
    Backlog,
    InstanceView,
    Limits,
    PlanError,
    PlannedCohort,
    Rates,
    check_plan,
    plan,
    predict_cached_tokens,
)

Jobs = list[tuple[list[int], int, int, int]]
CONTIGUOUS = Limits(scatter_work_share=-1.0)


def runs_of(cohorts: list[PlannedCohort], n_instances: int) -> list[list[int]]:
    runs: list[list[int]] = [[] for _ in range(n_instances)]
    for cohort in cohorts:
        runs[cohort.instance] += cohort.job_ids.tolist()
    return runs


def by_content(original: Backlog, cohorts: list[PlannedCohort]) -> list[tuple[int, list[tuple[bytes, int]]]]:
    """The plan without the ids, which tell equal jobs apart."""
    index = {job_id: place for place, job_id in enumerate(original.job_ids.tolist())}
    return [
        (cohort.instance, [(original.keys[index[i]], int(original.prompt_tokens[index[i]])) for i in cohort.job_ids])
        for cohort in cohorts
    ]


@given(jobs, instances(), st.sampled_from([Limits(), CONTIGUOUS]))
def test_every_job_is_in_one_cohort_with_its_true_sums(made: Jobs, views: list[InstanceView], limits: Limits) -> None:
    waiting = backlog(made)
    cohorts = plan(waiting, views, limits)
    check_plan(waiting, cohorts)
    for cohort in cohorts:
        index = cohort.job_ids - 100
        assert cohort.body_bytes == waiting.body_bytes[index].sum()
        assert cohort.prompt_tokens == waiting.prompt_tokens[index].sum()
        assert cohort.first_key == waiting.keys[index[0]]
        assert cohort.last_key == waiting.keys[index[-1]]
        assert len(cohort.predicted_cached_tokens) == len(cohort.first_of_group) == len(index)


@given(jobs, instances(), st.sampled_from([Limits(), CONTIGUOUS]))
def test_predictions_are_those_of_the_run_as_executed(made: Jobs, views: list[InstanceView], limits: Limits) -> None:
    waiting = backlog(made)
    cohorts = plan(waiting, views, limits)
    for number, view in enumerate(views):
        mine = [cohort for cohort in cohorts if cohort.instance == number]
        if not mine:
            continue
        index = np.concatenate([cohort.job_ids for cohort in mine]) - 100
        told = np.concatenate([cohort.predicted_cached_tokens for cohort in mine])
        keys, prompts = [waiting.keys[i] for i in index], waiting.prompt_tokens[index]
        assert told.tolist() == predict_cached_tokens(keys, prompts, view).tolist()
        assert (told % view.block_size == 0).all()
        assert (told < prompts).all()
        assert (told[prompts > view.kv_capacity_tokens] == 0).all()
        estimated = sum(cohort.estimated_seconds for cohort in mine)
        fits = prompts <= view.kv_capacity_tokens
        uncached, output = (prompts - told)[fits].sum(), waiting.output_tokens[index][fits].sum()
        rates = view.rates
        cost = uncached / rates.prefill_tokens_per_second + output / rates.decode_tokens_per_second
        assert estimated == pytest.approx(cost)


@given(jobs, instances(alike=True), st.sampled_from([Limits(), CONTIGUOUS]))
def test_a_plan_replicates_at_most_the_cuts(made: Jobs, views: list[InstanceView], limits: Limits) -> None:
    waiting = backlog(made)
    bound = prefix.bound_tokens(waiting.keys, waiting.prompt_tokens, 32)
    served = sum(int(cohort.predicted_cached_tokens.sum()) for cohort in plan(waiting, views, limits))
    longest_path = max(len(key) // prefix.RUNG_BYTES * 32 for key in waiting.keys)
    allowed = (len(views) - 1) * longest_path
    if limits is not CONTIGUOUS:
        allowed = max(allowed, limits.scatter_hit_share * bound)
    assert bound - allowed <= served <= bound


@given(jobs)
def test_one_instance_reaches_the_bound(made: Jobs) -> None:
    waiting = backlog(made)
    served = sum(int(cohort.predicted_cached_tokens.sum()) for cohort in plan(waiting, [instance()]))
    assert served == prefix.bound_tokens(waiting.keys, waiting.prompt_tokens, 32)


@given(jobs, instances(), st.randoms(use_true_random=False))
def test_arrival_order_does_not_matter(made: Jobs, views: list[InstanceView], random) -> None:
    # Equal in key and length means equal altogether here, so that ties cannot show.
    unique = list({(tuple(rungs), extra): (rungs, extra, out, size) for rungs, extra, out, size in made}.values())
    waiting = backlog(unique)
    order = list(range(len(unique)))
    random.shuffle(order)
    again = reordered(waiting, order)
    assert by_content(waiting, plan(waiting, views)) == by_content(again, plan(again, views))


@given(jobs, instances(alike=True))
def test_runs_are_contiguous_in_key_order_so_equal_prompts_are_neighbours(
    made: Jobs, views: list[InstanceView]
) -> None:
    waiting = backlog(made)
    runs = runs_of(plan(waiting, views, CONTIGUOUS), len(views))
    joined = [job_id - 100 for run in runs for job_id in run]
    assert joined == prefix.sort_order(waiting.keys, waiting.prompt_tokens).tolist()


@given(jobs, instances(alike=True))
def test_no_instance_works_much_longer_than_the_mean(made: Jobs, views: list[InstanceView]) -> None:
    waiting = backlog(made)
    cohorts = plan(waiting, views, CONTIGUOUS)
    loads = [sum(c.estimated_seconds for c in cohorts if c.instance == number) for number in range(len(views))]
    # A job is not divided: the mean, the largest job with its whole prompt, and the slide.
    largest = max(len(rungs) * 32 + extra for rungs, extra, _, _ in made) / 1000 + 40 / 500
    assert max(loads) <= (sum(loads) / len(loads) + 2 * largest) * 1.03 + 1e-9


def groups(n_groups: int, n_jobs: int, depth: int = 20) -> Backlog:
    made = [([group] * depth, 1 + job % 31, 10, 500) for group in range(n_groups) for job in range(n_jobs)]
    return backlog(made)


def test_many_long_prefixes_are_kept_together() -> None:
    waiting = groups(n_groups=8, n_jobs=12)
    views = [instance(), instance(queue="instance.b")]
    runs = runs_of(plan(waiting, views), 2)
    assert sorted(len(run) for run in runs) == [48, 48]
    owners = [{(job_id - 100) // 12 for job_id in run} for run in runs]
    assert not owners[0] & owners[1]


def test_a_few_hot_short_prefixes_are_dealt_out() -> None:
    waiting = groups(n_groups=2, n_jobs=2000, depth=2)
    views = [instance(queue=str(number)) for number in range(4)]
    cohorts = plan(waiting, views)
    runs = runs_of(cohorts, 4)
    assert all(len({(job_id - 100) // 2000 for job_id in run}) == 2 for run in runs)
    loads = [sum(c.estimated_seconds for c in cohorts if c.instance == number) for number in range(4)]
    assert max(loads) <= 1.04 * min(loads)  # a piece is a thirtieth of a share


def test_cohorts_are_bounded_and_cut_between_groups() -> None:
    waiting = groups(n_groups=40, n_jobs=16)
    cohorts = plan(waiting, [instance(max_num_seqs=16)], Limits(cohort_bytes=20 * 500))
    assert all(len(cohort.job_ids) <= 20 for cohort in cohorts)
    assert all(len(cohort.job_ids) >= 4 for cohort in cohorts)
    assert sum(bool(cohort.first_of_group[0]) for cohort in cohorts) >= 0.9 * len(cohorts)
    assert max(c.estimated_seconds for c in plan(waiting, [instance()], Limits(cohort_share=1))) <= 15
    assert all(len(c.job_ids) <= 512 for c in plan(groups(1, 3000, depth=1), [instance()], Limits(cohort_share=1)))


def test_unique_prompts_form_full_cohorts_too() -> None:
    waiting = backlog([([number], 1, 1, 10) for number in range(600)])
    cohorts = plan(waiting, [instance(max_num_seqs=64)])
    assert {len(cohort.job_ids) for cohort in cohorts[:-1]} <= set(range(16, 33))


def test_an_instance_goes_on_from_what_it_holds() -> None:
    waiting = groups(n_groups=8, n_jobs=10)
    held = [key_of([6] * 20), key_of([2] * 20)]
    views = [instance(held_key=key, queue=str(n)) for n, key in enumerate(held)]
    cohorts = plan(waiting, views)
    first = [next(c for c in cohorts if c.instance == number) for number in range(2)]
    assert [cohort.first_key for cohort in first] == held
    assert all(cohort.predicted_cached_tokens[0] > 0 for cohort in first)
    assert not any(cohort.first_of_group[0] for cohort in first)
    bound = prefix.bound_tokens(waiting.keys, waiting.prompt_tokens, 32)
    assert sum(int(c.predicted_cached_tokens.sum()) for c in cohorts) == bound + 2 * 20 * 32


@given(jobs, instances(alike=True), st.data())
def test_holding_something_never_serves_less(made: Jobs, views: list[InstanceView], data: st.DataObject) -> None:
    waiting = backlog(made)
    order = prefix.sort_order(waiting.keys, waiting.prompt_tokens)
    held_key = data.draw(st.sampled_from([waiting.keys[index] for index in order]))
    fresh = sum(int(c.predicted_cached_tokens.sum()) for c in plan(waiting, views[:1], CONTIGUOUS))
    held = [replace(views[0], held_key=held_key)]
    assert sum(int(c.predicted_cached_tokens.sum()) for c in plan(waiting, held, CONTIGUOUS)) >= fresh


def test_a_loaded_or_slow_instance_gets_less() -> None:
    waiting = groups(n_groups=100, n_jobs=10)
    total = sum(c.estimated_seconds for c in plan(waiting, [instance()]))
    counts = [len(run) for run in runs_of(plan(waiting, [instance(load_seconds=total / 2), instance()]), 2)]
    assert counts[0] == pytest.approx(250, abs=25)
    counts = [len(run) for run in runs_of(plan(waiting, [instance(load_seconds=2 * total), instance()]), 2)]
    assert counts == [0, 1000]
    slow = replace(instance(), rates=Rates(prefill_tokens_per_second=250, decode_tokens_per_second=125))
    counts = [len(run) for run in runs_of(plan(waiting, [slow, instance()]), 2)]
    assert counts[0] == pytest.approx(200, abs=25)


def test_jobs_go_where_they_fit_and_to_somebody_when_nowhere() -> None:
    waiting = backlog([([number] * 10, 1, 1, 10) for number in range(20)] + [([99] * 40, 1, 1, 10)])
    small, large = instance(kv_capacity_tokens=100), instance(kv_capacity_tokens=1000)
    cohorts = plan(waiting, [small, large])
    check_plan(waiting, cohorts)
    small_ids = {i for c in cohorts if c.instance == 0 for i in c.job_ids.tolist()}
    assert small_ids <= {120}
    assert sum(len(cohort.job_ids) for cohort in plan(waiting, [small, small])) == 21


def test_a_refused_job_does_not_break_the_chain() -> None:
    waiting = backlog([([1] * 4, 1, 1, 1), ([1] * 4 + [0] * 20, 1, 1, 1), ([1] * 4 + [2], 1, 1, 1)])
    [cohort] = plan(waiting, [instance(kv_capacity_tokens=200, max_num_seqs=64)])
    assert cohort.predicted_cached_tokens.tolist() == [0, 0, 128]


def test_nothing_to_plan_and_nobody_to_plan_for() -> None:
    empty = backlog([])
    assert plan(empty, []) == []
    check_plan(empty, [])
    with pytest.raises(PlanError, match="1 jobs and no instance"):
        plan(backlog([([1], 1, 1, 1)]), [])
    with pytest.raises(PlanError, match="above 0"):
        Rates(prefill_tokens_per_second=0, decode_tokens_per_second=1)


def test_check_plan_names_what_is_wrong() -> None:
    waiting = groups(2, 3)
    cohorts = plan(waiting, [instance()])
    with pytest.raises(PlanError, match="in no cohort"):
        check_plan(waiting, cohorts[1:])
    with pytest.raises(PlanError, match="in two cohorts"):
        check_plan(waiting, [*cohorts, cohorts[0]])
    with pytest.raises(PlanError, match="not of the backlog"):
        check_plan(reordered(waiting, [0, 1]), cohorts)


def test_a_large_backlog_is_planned() -> None:
    n_jobs = 50_000
    random = np.random.default_rng(1)
    rungs = np.repeat(random.integers(0, 500, (n_jobs, 1)), 20, axis=1)
    rungs[:, 15:] = random.integers(0, 3, (n_jobs, 5))
    made = Backlog(
        job_ids=np.arange(n_jobs, dtype=np.int64),
        keys=[row.astype(">u4").tobytes() for row in rungs],
        prompt_tokens=np.full(n_jobs, 650, dtype=np.int64),
        output_tokens=random.integers(1, 200, n_jobs),
        body_bytes=np.full(n_jobs, 2600, dtype=np.int64),
    )
    views = [instance(queue=str(number), max_num_seqs=256, rates=RATES) for number in range(8)]
    check_plan(made, plan(made, views))
