"""Samples the target's token at every row of a step."""

from __future__ import annotations

from torch import Tensor

from ..errors import ConfigError
from ..metadata.sampling import SamplingMetadata
from ..ops.tokens.sample import clean_logits, greedy_tokens, sample_tokens


def sample_target_tokens(
    logits: Tensor, sampling: SamplingMetadata | None
) -> tuple[Tensor, Tensor]:
    """Chooses a token at every row: logits [R, V] -> (tokens [R] int32, bad [R] bool).

    Without sampling metadata, or if every request is greedy, it takes the argmax. Otherwise it
    samples by each row's parameters, with noise keyed by (seed, position). `bad` marks rows with
    NaN.

    Raises:
        ConfigError: the sampling parameters are not one row per logits row.
    """
    logits, bad = clean_logits(logits)
    if sampling is None or sampling.all_greedy:
        return greedy_tokens(logits), bad
    if sampling.temperatures.shape[0] != logits.shape[0]:
        raise ConfigError(
            f"{sampling.temperatures.shape[0]} rows of sampling parameters for {logits.shape[0]} "
            "rows of logits: populate them for this batch (1 per context, K+1 per generation)."
        )
    return sample_tokens(logits, sampling), bad
