"""Long answers first: what an instance runs last must not take longer than all the rest of its run.

The end of a run is not the end of its work: a job that is admitted last decodes on alone, token by token. Graham's
longest-processing-time rule, applied only where it matters: jobs that would outlast the run go to its front, with
their whole prefix group where that is small, so that little or nothing is computed twice.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from service.core.cut import FloatArray
from service.core.prefix import IntArray

_LATE_SHARE = 1.0  # of the usual stay in the engine, beyond the end of the run: whoever is last stays so long
_SMALL_SHARE = 1 / 30  # of the run: a group up to so much moves as a whole


def long_first(
    *,
    seconds: FloatArray,
    output_tokens: IntArray,
    new_tokens: IntArray,
    first_of_group: NDArray[np.bool_],
    max_num_seqs: int,
    kv_capacity_tokens: int,
) -> IntArray:
    """Indices into a run, int64[n], in the order in which it should be executed; ascending where nothing need move.

    All arrays are [n], in execution order: estimated cost of each job, its answer, what it needs of the cache beyond
    what it shares, and where prefix groups begin. How long a job stays in the engine follows from Little's law: with
    r jobs at a time, r times its share (by answer) of the run.
    """
    n, run_seconds = len(seconds), float(seconds.sum())
    everything: IntArray = np.arange(n, dtype=np.int64)
    if not n or run_seconds <= 0:
        return everything
    outputs = np.maximum(output_tokens, 1)
    running = min(max_num_seqs, n, max(kv_capacity_tokens / max(float((new_tokens + outputs).mean()), 1.0), 1.0))
    usual_seconds = running * run_seconds / n
    stay_seconds = (1 - 1 / running) * usual_seconds * outputs / outputs.mean()  # beside others, which cost it nothing
    begins = np.cumsum(seconds) - seconds
    late = begins + stay_seconds > run_seconds + _LATE_SHARE * usual_seconds
    if not late.any():
        return everything
    groups = np.cumsum(first_of_group)
    small = np.bincount(groups, seconds)[groups] <= _SMALL_SHARE * run_seconds
    moved = late | (small & np.isin(groups, groups[late]))
    result: IntArray = np.concatenate((everything[moved], everything[~moved]))
    return result
