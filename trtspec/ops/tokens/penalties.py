"""Penalties, biases, bans and min-p on the target's logits, before a token is chosen.

Under speculation the row after draft i must count the sequence *and* drafts 1 … i, or the tokens
would not be those of plain decoding. This comes before temperature and filters, and before any rule
judges a draft.

Formulas: repetition penalty of Keskar et al. (2019), presence and frequency penalties of the
OpenAI API, min-p of Nguyen et al. (2024).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...metadata.logits import LogitsState


def shape_logits(
    state: LogitsState,
    logits: Tensor,
    slots: Tensor,
    drafts: Tensor,
    positions: Tensor,
    temperatures: Tensor,
) -> Tensor:
    """Returns logits [C + G*(K'+1), V] in float32, shaped row by row.

    Args:
        slots: [B] int64. drafts: [G, K'] int32, -1 is none.
        positions, temperatures: of the rows; the position is that of the token to be chosen.
    """
    contexts = slots.shape[0] - drafts.shape[0]
    per_row = torch.cat([slots[:contexts], slots[contexts:].repeat_interleave(drafts.shape[1] + 1)])
    logits = _penalised(state, logits.float(), per_row, _counts(state, per_row, drafts))
    banned = _banned(state, slots, per_row, drafts, positions)
    logits = logits.masked_fill(banned, float("-inf"))
    # p < min_p * max p, before the temperature divides both.
    floor = logits.amax(1) + temperatures * state.log_min_p[per_row]
    is_low = (logits < floor[:, None]) & (temperatures > 0)[:, None]
    return logits.masked_fill(is_low, float("-inf"))


def _counts(state: LogitsState, per_row: Tensor, drafts: Tensor) -> Tensor:
    """Returns how often each token is in a row's output, drafts before it included: [R, V] int32.

    Args:
        per_row: [R] int64, the slot of each row.
    """
    counts, (generations, num_drafts) = state.counts[per_row], drafts.shape
    contexts = len(per_row) - generations * (num_drafts + 1)
    seen = counts[contexts:].view(generations, num_drafts + 1, counts.shape[1])
    for i in range(num_drafts):  # rows after draft i have it in their sequence
        draft = drafts[:, i].to(torch.int64)
        one = (draft >= 0).to(torch.int32)[:, None, None].expand(-1, num_drafts - i, -1)
        index = draft.clamp_min(0)[:, None, None].expand(-1, num_drafts - i, -1)
        seen[:, i + 1 :].scatter_add_(2, index, one)
    return counts


def _penalised(state: LogitsState, logits: Tensor, per_row: Tensor, counts: Tensor) -> Tensor:
    """Returns logits [R, V] with penalties and biases."""
    repetition, presence, frequency = state.penalties[per_row].unbind(1)
    is_repeated = state.in_prompt[per_row] | (counts > 0)
    scaled = torch.where(logits > 0, logits / repetition[:, None], logits * repetition[:, None])
    logits = torch.where(is_repeated, scaled, logits)
    logits = logits - frequency[:, None] * counts - presence[:, None] * (counts > 0)
    return logits + state.bias[per_row]


def _banned(
    state: LogitsState, slots: Tensor, per_row: Tensor, drafts: Tensor, positions: Tensor
) -> Tensor:
    """Returns which tokens would end a text too early or complete a bad word, [R, V] bool."""
    ends, vocab = state.ends[per_row], state.counts.shape[1]
    is_held = (ends >= 0) & (positions < state.first_end[per_row])[:, None]
    last, is_bad = _bad_words(state, slots, per_row, drafts)
    held = torch.cat([torch.where(is_held, ends, -1), torch.where(is_bad, last, -1)], dim=1)
    held = torch.where(held < 0, vocab, held)  # one column more takes these
    banned = torch.zeros(1, 1, dtype=torch.bool, device=held.device).expand(len(held), vocab + 1)
    return banned.scatter(1, held, True)[:, :-1]


def _bad_words(
    state: LogitsState, slots: Tensor, per_row: Tensor, drafts: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns (the last token of every bad word [R, W], whether it would complete the word [R, W]).

    It would if the tokens before the row, drafts included, end in the word's other tokens.
    """
    contexts, width = slots.shape[0] - drafts.shape[0], state.tail.shape[1]
    tokens_so_far = torch.cat([state.tail[slots[contexts:]], drafts.to(torch.int64)], dim=1)
    before = torch.cat(
        [state.tail[slots[:contexts]], tokens_so_far.unfold(1, width, 1).flatten(0, 1)]
    )  # [R, L-1]
    words = state.words[per_row]
    rest, last = words[..., :-1], words[..., -1]
    return last, ((rest == before[:, None]) | (rest < 0)).all(-1) & (last >= 0)


def count_output(state: LogitsState, slots: Tensor, tokens: Tensor, lens: Tensor) -> None:
    """Adds a step's output to the state: tokens [B, K'+1] int32, of which lens [B] are new."""
    width = state.tail.shape[1]
    tokens_so_far = torch.cat([state.tail[slots], tokens.to(torch.int64)], dim=1)
    columns = lens[:, None] + torch.arange(width, device=lens.device)
    state.tail[slots] = tokens_so_far.gather(1, columns.to(torch.int64))
    is_new = torch.arange(tokens.shape[1], device=tokens.device) < lens[:, None]
    entry = slots[:, None] * state.counts.shape[1] + tokens.clamp_min(0).to(torch.int64)
    state.counts.view(-1).scatter_add_(0, entry.flatten(), is_new.to(torch.int32).flatten())
