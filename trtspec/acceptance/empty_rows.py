"""Rows of which bans leave nothing: the output ends before the first of them.

Banned tokens and a grammar together may leave no token at all. Behind an accepted draft that is an
error of the request, as in plain decoding, unless its output ends earlier. Behind a rejected one it
is none. So a step puts out what comes before such a row. The next one begins with it, if there is a
next one, and then the request ends with an error.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ..ops.tokens.accept import mask_after
from ..ops.tokens.greedy import Accepted
from .rule import Candidates


def end_drafts_before_empty_rows(candidates: Candidates) -> tuple[Candidates, Tensor]:
    """Returns what a rule can judge, without drafts from a request's first empty row on, and
    without empty rows after drafts.

    Returns:
        (the candidates, [G] int64: how many tokens may come out, K'+1 where no row is empty).
    """
    contexts, num_drafts, logits = candidates.num_contexts, candidates.num_drafts, candidates.logits
    rows = logits[contexts:].unflatten(0, (-1, num_drafts + 1))
    is_empty = rows.amax(-1) == float("-inf")  # [G, K'+1]
    is_empty[:, 0] = False
    column = torch.arange(num_drafts + 1, device=logits.device)
    limit = torch.where(is_empty, column, num_drafts + 1).amin(1)
    drafts = torch.where(column[:-1] < limit[:, None], candidates.drafts, -1)
    is_filled = nn.functional.pad(is_empty.flatten(), (contexts, 0))
    logits = logits.masked_fill(is_filled[:, None], 0.0)
    return replace(candidates, logits=logits, drafts=drafts), limit


def cut(accepted: Accepted, limit: Tensor, num_contexts: int) -> Accepted:
    """Returns the outcome of a step with at most `limit` [G] tokens of each generation."""
    lens = accepted.lens.clone()
    lens[num_contexts:] = torch.minimum(lens[num_contexts:], limit.to(lens.dtype))
    return replace(
        accepted,
        tokens=mask_after(accepted.tokens, lens),
        lens=lens,
        num_accepted_drafts=lens - 1,
    )
