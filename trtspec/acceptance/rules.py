"""The acceptance rules: one table, by the name in a config's `acceptance`.

| rule | drafts of sampled requests are | and accepted | kernels |
|---|---|---|---|
| strict | the drafter's best tokens | while they are the target's choice | both |
| exact_match | drawn with the target's noise | while they are the target's choice | both |
| rejection | drawn from the drafter's distribution | each with min(1, p/q) | both |
| block | the same | jointly, at least as many | both |
| relaxed: `Relaxed(rule)` | as in its rule | as in its rule; greedy ones if close | greedy |
| forced: `Forced(rule)` | as in its rule | a set number of them | as its rule |

"both" kernels are those for greedy and for sampled batches. The one for all-greedy batches is CUDA
C++ (`ops/tokens/greedy.py`). The one for batches with sampled requests is Triton
(`ops/tokens/triton_sampled.py`).

A greedy request's drafts are the drafter's best tokens. Every rule but the last two judges them by
exact match.

To add a rule: a file here with a subclass of `Rule`, a row of `RULES`, and its name at the same
place of `ACCEPTANCE_RULES` beside the configs.
"""

from __future__ import annotations

from ..config import DecodingBaseConfig, MTPDecodingConfig
from .rejection import Rejection, block_rejection, token_rejection
from .relaxed import Relaxed
from .rule import Drawn, Rule
from .strict import Match

STRICT = Match()

RULES: dict[str, Rule] = {
    "strict": STRICT,
    "exact_match": Match(drawn=Drawn.COUPLED),
    "rejection": Rejection(verdict=token_rejection),
    "block": Rejection(verdict=block_rejection, is_block=True),
}


def rule_of(config: DecodingBaseConfig | None) -> Rule:
    """Returns the rule of a config. Plain decoding has one too, which finds no drafts."""
    if config is None:
        return STRICT
    rule = RULES[config.acceptance]
    if isinstance(config, MTPDecodingConfig) and config.use_relaxed_acceptance_for_thinking:
        return Relaxed(
            rule,
            top_k=config.relaxed_topk,
            delta=config.relaxed_delta,
            begin_token=config.begin_thinking_phase_token,
            end_token=config.end_thinking_phase_token,
        )
    return rule
