"""Forced acceptance: for debugging and for timing a step at a chosen acceptance.

The environment variable is TensorRT-LLM's and counts *draft* tokens, bonus excluded. Output of a
forced run is not the model's text; every statistic that reports one says so.
"""

from __future__ import annotations

import logging
import math
import os

import torch
from torch import Tensor

from ..ops.tokens.noise import NoiseStream, uniform_noise

FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR = "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS"

logger = logging.getLogger(__name__)


def get_force_num_accepted_tokens() -> float:
    """The number of draft tokens to accept in every step; 0 is off.

    Unset or 0 is off; a fraction is the probability of one more; anything that is not a
    non-negative finite number warns and is off.
    """
    text = os.environ.get(FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR)
    if text is None:
        return 0.0
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        logger.warning(
            "%s=%r is not a number >= 0: forced acceptance is off.",
            FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR,
            text,
        )
        return 0.0
    return value


def force_accepted_lens(
    lens: Tensor, forced: float, num_draft_tokens: int, seeds: Tensor, positions: Tensor
) -> Tensor:
    """lens [G] -> [G] int32, min(forced + 1, K + 1), the fraction drawn per row.

    Args:
        forced: draft tokens to accept, > 0.
        seeds, positions: [G] int64, the key of the noise behind the fraction.
    """
    forced = min(forced, num_draft_tokens)
    whole, fraction = int(forced), forced - int(forced)
    extra = uniform_noise(seeds, positions, NoiseStream.FORCED, 1)[:, 0] < fraction
    total = whole + 1 + extra.to(torch.int32)
    return total.clamp(max=num_draft_tokens + 1).to(torch.int32).expand_as(lens)
