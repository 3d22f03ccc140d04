"""Forced acceptance: for debugging and for timing a step at a chosen acceptance.

The environment variable is TensorRT-LLM's and counts *draft* tokens, bonus excluded. Output of a
forced run is not the model's; every statistic that reports one says so.
"""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..metadata.sampling import SamplingMetadata
from ..ops.tokens.greedy import Accepted
from ..ops.tokens.noise import NoiseStream, uniform_noise
from .rule import Candidates, Drawn, Judged, Rule

FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR = "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Forced(Rule):
    """Wraps a rule and replaces its number of accepted drafts."""

    rule: Rule
    num_drafts: float  # > 0; a fraction is the probability of one more

    @property
    def drawn(self) -> Drawn:  # type: ignore[override]
        return self.rule.drawn

    def judge(self, candidates: Candidates) -> Judged:
        judged = self.rule.judge(candidates)
        lens = forced_lens(
            judged.lens,
            self.num_drafts,
            candidates.num_contexts,
            candidates.num_drafts,
            candidates.sampling,
        )
        return replace(judged, lens=lens)

    def accept(self, candidates: Candidates, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.rule.accept(candidates, tokens)

    def by_kernel(self, candidates: Candidates, forced_len: int = 0) -> Accepted | None:
        """Returns None for a fraction, which no kernel serves."""
        if self.num_drafts != int(self.num_drafts):
            return None
        return self.rule.by_kernel(candidates, min(int(self.num_drafts), candidates.num_drafts) + 1)

    def update(self, candidates: Candidates, tokens: Tensor, lens: Tensor) -> None:
        self.rule.update(candidates, tokens, lens)


def get_force_num_accepted_tokens() -> float:
    """Returns the number of draft tokens to accept in every step; 0 is off.

    A fraction is the probability of one more. Unset is off. Anything but a finite number >= 0 is
    off too, with a warning.
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
    """Returns forced lengths: lens [G] -> [G] int32, min(forced + 1, K + 1).

    Args:
        forced: draft tokens to accept, > 0. A fraction is drawn for each request.
        seeds, positions: [G] int64, keys of that noise.
    """
    forced = min(forced, num_draft_tokens)
    count, fraction = int(forced), forced - int(forced)
    extra = uniform_noise(seeds, positions, NoiseStream.FORCED, 1)[:, 0] < fraction
    total = count + 1 + extra.to(torch.int32)
    return total.clamp(max=num_draft_tokens + 1).to(torch.int32).expand_as(lens)


def forced_lens(
    lens: Tensor, forced: float, num_contexts: int, num_drafts: int, sampling: SamplingMetadata
) -> Tensor:
    """Returns lens [B] -> [B] int32, forced for generations.

    Args:
        forced: draft tokens to accept, > 0.
        sampling: keys the noise of a fraction. Without rows that noise is drawn anew each time.
    """
    generations = lens[num_contexts:]
    if generations.shape[0] == 0:
        return lens
    if sampling.seeds.shape[0]:  # one row per request is enough: its first
        seeds = sampling.seeds[num_contexts :: num_drafts + 1]
        positions = sampling.positions[num_contexts :: num_drafts + 1]
    else:
        seeds = torch.arange(generations.shape[0], device=lens.device)
        positions = torch.randint(2**62, seeds.shape, device=lens.device)
    forced_generations = force_accepted_lens(generations, forced, num_drafts, seeds, positions)
    return torch.cat([lens[:num_contexts], forced_generations])
