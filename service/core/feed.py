"""How much may be out for an engine: what it can run, and a little behind that, since what is out cannot be stolen."""

from __future__ import annotations

_AHEAD_SECONDS = 10.0  # of estimated work behind what runs: many looks of the dispatcher
_LEAST_AHEAD_JOBS = 4
_AHEAD_SHARE = 0.5  # of max_num_seqs, and of the cache: the most, however short the jobs


def jobs_wanted(
    *,
    jobs: int,
    seconds: float,
    new_tokens: float,
    max_num_seqs: int,
    kv_capacity_tokens: int,
    ahead_jobs: int | None = None,
) -> int:
    """How many more jobs should go out to an engine, 0 for none.

    Out and unfinished are `jobs`, with so many estimated `seconds` and `new_tokens` (prompt tokens that the cache
    does not serve). With `ahead_jobs` just so many wait behind `max_num_seqs`. Otherwise as many as ten seconds hold,
    between 4 and half of `max_num_seqs`, and none where what is out fills the cache half as often again as it can.
    """
    if ahead_jobs is not None:
        return max(max_num_seqs + ahead_jobs - jobs, 0)
    if new_tokens >= (1 + _AHEAD_SHARE) * kv_capacity_tokens:
        return 0
    most = max(int(_AHEAD_SHARE * max_num_seqs), _LEAST_AHEAD_JOBS)
    if jobs and seconds > 0:
        most = int(min(max(_AHEAD_SECONDS * jobs / seconds, _LEAST_AHEAD_JOBS), most))
    return max(max_num_seqs + most - jobs, 0)
