"""Rows of which bans leave nothing: no output goes beyond the first of them.

Banned tokens and a grammar together may leave no token at all. Behind an accepted draft that is an
error of the request, as in plain decoding, unless its output ends earlier. Behind a rejected one it
is none. So a step puts out what comes before such a row. If the output goes on, the next step
begins with the row, and the request ends with an error.

Rows whose token is known, inside a prompt or behind the output of a preempted request, choose
nothing. Bans that follow the output do not fit them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..ops.tokens.accept import mask_after
from ..ops.tokens.greedy import Accepted
from .rule import Candidates


def fill_empty_rows(candidates: Candidates) -> Tensor:
    """Writes zeros to empty rows that are no error by themselves: after drafts, and of contexts
    whose token is known. What a rule chooses there must be cut off.

    A rule's first tokens do not depend on what the target has behind them, so whatever stands there
    is lossless.

    Returns:
        [G] int64: how many tokens may come out, K'+1 where no row is empty.
    """
    contexts, rows_each = candidates.num_contexts, candidates.num_drafts + 1
    fills = candidates.logits.amax(-1) == float("-inf")  # of NaN it is False
    fills[:contexts] &= candidates.step.next_prompt_tokens[:contexts] >= 0
    of_generations = fills[contexts:].view(-1, rows_each)
    of_generations[:, 0] = False
    candidates.logits.masked_fill_(fills[:, None], 0.0)
    row = torch.arange(rows_each, device=fills.device)
    return torch.where(of_generations, row, rows_each).amin(1)


def cut(accepted: Accepted, limit: Tensor, num_contexts: int) -> Accepted:
    """Returns the outcome of a step with at most `limit` [G] tokens of each generation.

    The last token of one that is cut is an accepted draft, in the place of the bonus.
    """
    lens = accepted.lens.clone()
    lens[num_contexts:] = torch.minimum(lens[num_contexts:], limit.to(lens.dtype))
    return replace(
        accepted,
        tokens=mask_after(accepted.tokens, lens),
        lens=lens,
        num_accepted_drafts=lens - 1,
    )
