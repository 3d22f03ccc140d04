"""Suffix lookup: earlier occurrences of a text's last tokens, and a vote on what comes next.

A *match* ends at an earlier token, and agrees with the text's end in its last n tokens. What
follows it is a guess of what comes next. `matches_in_text` finds a request's own, `ring.py` those
in other requests' texts. `vote` chooses a continuation, and how much of it is worth verifying.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Matches(NamedTuple):
    """C matches of each of B texts."""

    lens: Tensor  # [B, C] int64, tokens that agree; 0: no match
    tokens: Tensor  # [B, C, K] int32, what follows; -1 past what is known


class Search(NamedTuple):
    """What to look for."""

    longest: int  # tokens of a match that are counted
    shortest: int  # tokens of a match that may draft
    num_matches: int  # C, that are compared
    max_draft_len: int  # K


def suffixes(history: Tensor, lens: Tensor, count: int) -> Tensor:
    """Returns the last tokens of texts, newest first: [B, count] int32, -1 before a text's start.

    Args:
        history: [B, L] int32. lens: [B] int64, of the texts, at most L.
    """
    back = lens[:, None] - 1 - torch.arange(count, device=history.device)
    return history.gather(1, back.clamp_min(0)).masked_fill(back < 0, -1)


def match_lens(history: Tensor, lens: Tensor, last: Tensor) -> Tensor:
    """Returns how many of a text's last tokens agree with those that end at each position.

    Args:
        history: [B, L] int32. lens: [B] int64, of the texts, at most L.
        last: [B, N] int32, `suffixes` of them: at most N tokens are counted.

    Returns:
        [B, L] int32, 0 from the last token on.
    """
    size = history.shape[1]
    is_past = torch.arange(size, device=history.device) < lens[:, None] - 1
    run = is_past.to(torch.int32)  # 1 while the tokens compared so far agree
    found = torch.zeros_like(run)
    for j in range(min(last.shape[1], size)):
        token = last[:, j : j + 1]
        run[:, :j] = 0
        run[:, j:] *= (history[:, : size - j] == token) & (token >= 0)
        found += run
    return found


def matches_in_text(history: Tensor, lens: Tensor, search: Search) -> Matches:
    """Finds the longest matches in each text itself, of equal length the latest.

    A match so close to the end that fewer than K tokens follow is copied on into itself. So a text
    with period p is continued with period p.

    Args:
        history: [B, L] int32. lens: [B] int64, of the texts, at most L < 2^24.
    """
    size = history.shape[1]
    found = match_lens(history, lens, suffixes(history, lens, search.longest))
    position = torch.arange(size, device=history.device, dtype=torch.int32)
    score = torch.where(found >= search.shortest, found * size + position, -1)
    best = score.topk(min(search.num_matches, size), dim=1).values.to(torch.int64)  # [B, C]
    ends = best.clamp_min(0) % size
    period = (lens[:, None] - 1 - ends).clamp_min(1)[..., None]
    step = torch.arange(search.max_draft_len, device=history.device)
    following = (ends[..., None] + 1 + step % period).clamp_max(size - 1)
    tokens = history.gather(1, following.flatten(1)).view(following.shape)
    is_match = best >= 0
    return Matches(
        lens=torch.where(is_match, best // size, 0),
        tokens=tokens.masked_fill(~is_match[..., None], -1),
    )


class Continuation(NamedTuple):
    """What is drafted for each of B texts."""

    tokens: Tensor  # [B, K] int32, -1 where there is no draft
    match_lens: Tensor  # [B] int64, tokens of the match that it follows; 0: no drafts
    worth: Tensor  # [B] float32, how many are expected to be accepted


def vote(sources: tuple[Matches, ...], decay: float, least: float) -> Continuation:
    """Returns the continuation that most tokens are expected to be accepted of, and no more of it.

    Draft k of a match of n tokens is expected to be accepted with probability

        n / (n + decay * k) * (share of the source's matches of >= n tokens that agree up to k).

    A match's worth is the sum of these. Drafts below `least` are left out. Of equal worth the
    earlier source wins, then the longer match, then the later one.

    Args:
        sources: each in the order of preference, as the functions that find them return it.
    """
    chances = torch.cat([_chances(matches, decay) for matches in sources], dim=1)  # [B, C, K]
    chances = chances.masked_fill(chances < least, 0.0)
    worth, best = chances.sum(-1).max(1)
    chosen = best[:, None, None].expand(-1, 1, chances.shape[2])
    tokens = torch.cat([matches.tokens for matches in sources], dim=1).gather(1, chosen)
    tokens = tokens.masked_fill(chances.gather(1, chosen) == 0, -1).squeeze(1)
    lens = torch.cat([matches.lens for matches in sources], dim=1).gather(1, best[:, None])
    return Continuation(tokens, lens.squeeze(1).masked_fill(worth == 0, 0), worth)


def _chances(matches: Matches, decay: float) -> Tensor:
    """Returns how probably each match's drafts are accepted, [B, C, K]."""
    lens, tokens = matches
    same = tokens[:, :, None] == tokens[:, None]  # [B, C, C, K]
    agrees = same.to(torch.uint8).cummin(-1).values
    counts = (lens[:, None] >= lens[..., None]) & (lens[:, None] > 0)  # [B, C, C]
    votes = (agrees * counts[..., None]).sum(2)  # [B, C, K]
    share = votes / counts.sum(-1, keepdim=True).clamp_min(1)
    depth = torch.arange(1, tokens.shape[2] + 1, device=tokens.device)
    known = (tokens >= 0).to(torch.uint8).cummin(-1).values
    length = lens[..., None].clamp_min(1)
    return share * known * (length / (length + decay * depth))
