"""Log probabilities of the tokens that a step emits, and of the likeliest others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class TokenLogprobs(NamedTuple):
    """One row per logits row of a step; N alternatives."""

    own: Tensor  # [R] float32, of the token chosen at the row
    ranks: Tensor  # [R] int64, 1 is the likeliest
    top_ids: Tensor  # [R, N] int64, likeliest first
    top: Tensor  # [R, N] float32

    def rows(self, count: int) -> TokenLogprobs:
        """Returns the first `count` rows."""
        return TokenLogprobs(*(tensor[:count] for tensor in self))

    @staticmethod
    def joined(parts: Sequence[TokenLogprobs]) -> TokenLogprobs:
        """Returns the rows of all parts."""
        return TokenLogprobs(*(torch.cat(of_parts) for of_parts in zip(*parts, strict=True)))

    def to_host(self) -> TokenLogprobs:
        """Copies it to the CPU; on CUDA the host does not wait."""
        return TokenLogprobs(*(tensor.to("cpu", non_blocking=True) for tensor in self))


def token_logprobs(
    logits: Tensor, new_tokens: Tensor, num_contexts: int, num_top: int
) -> TokenLogprobs:
    """Returns log probabilities under the model's distribution: temperature 1, before filters.

    Args:
        logits: [C + G*(K'+1), V] of the target.
        new_tokens: [B, >= K'+1] int32, the token chosen at each row. It is -1 past the length,
            where the result means nothing. A context's is in column 0.
        num_top: N >= 0.
    """
    rows, generations = logits.shape[0] - num_contexts, new_tokens.shape[0] - num_contexts
    per_generation = rows // generations if generations else 0
    own_tokens = torch.cat(
        [new_tokens[:num_contexts, 0], new_tokens[num_contexts:, :per_generation].flatten()]
    )
    return logprobs_of(logits, own_tokens, num_top)


def logprobs_of(logits: Tensor, tokens: Tensor, num_top: int) -> TokenLogprobs:
    """The same of given tokens.

    Args:
        logits: [R, V] of the target. tokens: [R] int; where one is -1 the result means nothing.
    """
    logits = logits.float()
    total = logits.logsumexp(-1)
    own = logits.gather(1, tokens.clamp_min(0).to(torch.int64)[:, None])
    top, top_ids = logits.topk(min(num_top, logits.shape[-1]), dim=-1)
    ranks = 1 + (logits > own).sum(-1)
    return TokenLogprobs(own[:, 0] - total, ranks, top_ids, top - total[:, None])
