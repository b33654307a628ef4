"""The cost model of an engine of which only the two fitted rates are known."""

from __future__ import annotations

from service.core.plan import Rates
from service.core.scenario import EngineShape
from service.core.simulate import DEFAULT_COST, CostModel

_LEAST_PREFILL_SHARE = 0.1  # of a full step's time goes to its tokens, whatever the decode rate says of steps


def cost_of_rates(rates: Rates, shape: EngineShape, context_tokens: float) -> CostModel:
    """Constants under which an engine of this shape has these rates, for sequences of `context_tokens` on average.

    The constants of decoding keep the proportions that they have in DEFAULT_COST: the decode rate scales them, then
    the prefill rate says what is left for a token of a full step. `shape.cost` is not looked at.
    """
    running = max(1, min(shape.max_num_seqs, int(shape.kv_capacity_tokens / max(context_tokens, 1.0))))
    default = DEFAULT_COST.seconds(prefill_tokens=0, decoding=running, context_tokens=int(running * context_tokens))
    scale = running / rates.decode_tokens_per_second / default
    step_seconds = DEFAULT_COST.step_seconds * scale
    token_seconds = 1 / rates.prefill_tokens_per_second
    return CostModel(
        step_seconds=step_seconds,
        prefill_token_seconds=max(
            token_seconds - step_seconds / shape.max_batched_tokens, _LEAST_PREFILL_SHARE * token_seconds
        ),
        decode_sequence_seconds=DEFAULT_COST.decode_sequence_seconds * scale,
        context_token_seconds=DEFAULT_COST.context_token_seconds * scale,
    )
