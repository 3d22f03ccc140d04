"""Chooses tokens from logits: filters, and greedy and sampled choice by one formula."""

from __future__ import annotations

import torch
from torch import Tensor

from ...metadata.sampling import SamplingMetadata
from .noise import NoiseStream, gumbel_noise


def clean_logits(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces NaN by -inf, so that argmax ignores it.

    Returns:
        (logits [R, V], bad [R] bool: rows that held a NaN, or nothing above -inf). The logits may
        be those given.
    """
    bad = ~(logits.amax(-1) > float("-inf"))  # amax is NaN where any entry is
    if is_on_cpu(logits) and not bad.any():
        return logits, bad
    inf = float("inf")
    return torch.nan_to_num(logits, nan=-inf, posinf=inf, neginf=-inf), bad


def greedy_tokens(logits: Tensor) -> Tensor:
    """Takes the argmax of [R, V]: [R] int32, the lowest index among equal maxima."""
    return argmax(logits).to(torch.int32)


def argmax(x: Tensor) -> Tensor:
    """Returns x.argmax(-1), the lowest index among equal maxima.

    On a CPU torch's `max` finds it in a quarter of the time.
    """
    return x.max(-1).indices if is_on_cpu(x) else x.argmax(-1)


def is_on_cpu(x: Tensor) -> bool:
    """Whether the host may look at a value without waiting for a device."""
    return x.device.type == "cpu"


def filter_logits(logits: Tensor, top_ks: Tensor, top_ps: Tensor) -> Tensor:
    """Sets the logits outside top-k and then top-p to -inf, row by row.

    Args:
        logits: [R, V] float32, already divided by the temperature.
        top_ks: [R] int; 0 (or >= V) keeps all.
        top_ps: [R] float in (0, 1]. The smallest set of tokens stays whose probability,
            renormalised after top-k, reaches top_p (Holtzman et al., 2020). 1 keeps all.

    Of equal logits at the boundary those with the lowest indices stay.
    """
    vocab = logits.shape[-1]
    values, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab, device=logits.device)
    ks = torch.where((top_ks <= 0) | (top_ks > vocab), vocab, top_ks)
    drop = rank >= ks[:, None]
    probs = values.masked_fill(drop, float("-inf")).softmax(-1)
    before = probs.cumsum(-1) - probs  # probability of everything ranked higher
    drop |= (before >= top_ps[:, None]) & (top_ps[:, None] < 1.0)
    drop[:, 0] = False
    return logits.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), float("-inf"))


def apply_filters(logits: Tensor, sampling: SamplingMetadata) -> Tensor:
    """Applies every filter of the rows' requests: logits [R, V] float32, divided by temperature.

    No other code filters, but for its twin in `triton_filter.py`.
    """
    if not sampling.has_filters:
        return logits
    return filter_logits(logits, sampling.top_ks, sampling.top_ps)


def sample_tokens(
    logits: Tensor, sampling: SamplingMetadata, *, stream: NoiseStream = NoiseStream.TARGET
) -> Tensor:
    """Samples one token per row: argmax(filtered logits / T + Gumbel noise), at T = 0 the argmax.

    Computed as argmax(logits + T * noise), so a greedy row is exact whatever shares the batch.

    Args:
        logits: [R, V], no NaN. sampling: one row per row of logits.

    Returns:
        [R] int32.
    """
    logits, temperature = logits.float(), sampling.temperatures[:, None]
    filtered = logits
    if sampling.has_filters:  # else the host knows that there is nothing to sort
        kept = apply_filters(logits / temperature.clamp_min(1e-6), sampling)
        filtered = logits.masked_fill(torch.isneginf(kept), float("-inf"))
    noise = gumbel_noise(sampling.seeds, sampling.positions, stream, logits.shape[-1])
    return greedy_tokens(noise.mul_(temperature).add_(filtered))
