"""What a request does to the target's logits before a token is chosen: penalties, biases, bans.

Under speculation the row after draft i must see the text *and* drafts 1 … i, or the tokens would
not be those of plain decoding. State is kept by slot on the device, so that a step asks the host
for nothing; it is made when the first request needs it. Shaping comes before temperature and
filters, and before a draft is judged by any rule.

Formulas: repetition penalty of Keskar et al. (2019), presence and frequency penalties of the
OpenAI API, min-p of Nguyen et al. (2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .sampling import rows_to_tensor, to_device

MAX_ENDS = 32
"""End tokens of one request that `min_tokens` can hold back."""
MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS = 64, 8


@dataclass(frozen=True)
class LogitsState:
    """S slots and one scratch slot; V tokens; E end tokens; W bad words of L tokens. 9 bytes a slot
    and token."""

    counts: Tensor  # [S+1, V] int32, in the output so far
    in_prompt: Tensor  # [S+1, V] bool
    bias: Tensor  # [S+1, V] float32; -inf bans
    penalties: Tensor  # [S+1, 3] float32: repetition, presence, frequency
    log_min_p: Tensor  # [S+1] float32, -inf is off
    ends: Tensor  # [S+1, E] int64, tokens that may not come before `first_end`, -1 none
    first_end: Tensor  # [S+1] int64, the first position at which they may
    words: Tensor  # [S+1, W, L] int64, right-aligned, -1 before them
    tail: Tensor  # [S+1, L-1] int64, the text's last tokens, -1 before it begins
    shaped_slots: set[int] = field(default_factory=set)  # whose last request shaped logits

    @staticmethod
    def allocate(num_slots: int, vocab_size: int, device: torch.device) -> LogitsState:
        rows = num_slots + 1
        return LogitsState(
            counts=torch.zeros(rows, vocab_size, dtype=torch.int32, device=device),
            in_prompt=torch.zeros(rows, vocab_size, dtype=torch.bool, device=device),
            bias=torch.zeros(rows, vocab_size, device=device),
            penalties=torch.tensor([1.0, 0.0, 0.0], device=device).repeat(rows, 1),
            log_min_p=torch.full((rows,), float("-inf"), device=device),
            ends=torch.full((rows, MAX_ENDS), -1, dtype=torch.int64, device=device),
            first_end=torch.zeros(rows, dtype=torch.int64, device=device),
            words=torch.full((rows, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), -1, device=device),
            tail=torch.full((rows, MAX_BAD_WORD_TOKENS - 1), -1, device=device),
        )

    def admit(
        self, slot: int, params: Any, prompt: Sequence[int], output: Sequence[int],
        end_ids: Sequence[int],
    ) -> None:  # fmt: skip
        """A request enters `slot`, with its output if it was preempted. Also one that shapes
        nothing: what the slot's last request asked for must not stay. (After another such there is
        nothing to do.)

        Args:
            params: its SamplingParams. end_ids: the tokens that end it, at most MAX_ENDS of them in
                the vocabulary.
        """
        if not params.shapes_logits and slot not in self.shaped_slots:
            return
        self.shaped_slots.add(slot)  # also if what follows raises
        device, vocab = self.counts.device, self.counts.shape[1]
        text = torch.tensor([*prompt, *output], dtype=torch.int64)
        counts = torch.bincount(text[len(prompt) :], minlength=vocab).to(torch.int32)
        in_prompt = torch.bincount(text[: len(prompt)], minlength=vocab) > 0
        bias = torch.zeros(vocab)
        biased = [token for token, _ in params.logit_bias_items]
        values = torch.tensor([value for _, value in params.logit_bias_items], dtype=bias.dtype)
        bias[torch.tensor(biased, dtype=torch.int64)] = values
        bias[torch.tensor(params.bad_token_ids or (), dtype=torch.int64)] = float("-inf")
        self.counts[slot] = to_device(counts, device)
        self.in_prompt[slot] = to_device(in_prompt, device)
        self.bias[slot] = to_device(bias, device)
        penalties = [params.repetition_penalty, params.presence_penalty, params.frequency_penalty]
        self.penalties[slot] = rows_to_tensor(penalties, torch.float32, device)
        min_p = torch.tensor([params.min_p]).log()
        self.log_min_p[slot : slot + 1] = to_device(min_p, device)
        ends = [token for token in end_ids if token < vocab] if params.min_tokens else []
        ends += [-1] * (MAX_ENDS - len(ends))
        self.ends[slot] = rows_to_tensor(ends, torch.int64, device)
        first = min(len(prompt) + params.min_tokens, torch.iinfo(torch.int64).max)
        self.first_end[slot : slot + 1] = rows_to_tensor([first], torch.int64, device)
        count, longest = self.words.shape[1:]
        words = [[-1] * (longest - len(word)) + list(word) for word in params.bad_words or ()]
        words += [[-1] * longest] * (count - len(words))
        self.words[slot] = rows_to_tensor(words, torch.int64, device)
        tail = [-1] * self.tail.shape[1] + text.tolist()[-self.tail.shape[1] :]
        self.tail[slot] = rows_to_tensor(tail[-self.tail.shape[1] :], torch.int64, device)
        if not params.shapes_logits:
            self.shaped_slots.remove(slot)

    def shape(
        self, logits: Tensor, slots: Tensor, drafts: Tensor, positions: Tensor, temperatures: Tensor
    ) -> Tensor:
        """logits [C + G*(K'+1), V] -> the same in float32, shaped row by row.

        Args:
            slots: [B] int64. drafts: [G, K'] int32, -1 is none.
            positions, temperatures: of the rows; the position is that of the token to be chosen.
        """
        num_requests, (generations, num_drafts) = slots.shape[0], drafts.shape
        contexts = num_requests - generations
        per_row = torch.cat([slots[:contexts], slots[contexts:].repeat_interleave(num_drafts + 1)])
        logits, counts = logits.float(), self.counts[per_row]
        seen = counts[contexts:].view(generations, num_drafts + 1, counts.shape[1])
        for i in range(num_drafts):  # rows after draft i have it in their text
            draft = drafts[:, i].to(torch.int64)
            one = (draft >= 0).to(torch.int32)[:, None, None].expand(-1, num_drafts - i, -1)
            index = draft.clamp_min(0)[:, None, None].expand(-1, num_drafts - i, -1)
            seen[:, i + 1 :].scatter_add_(2, index, one)
        repetition, presence, frequency = self.penalties[per_row].unbind(1)
        is_repeated = self.in_prompt[per_row] | (counts > 0)
        scaled = torch.where(logits > 0, logits / repetition[:, None], logits * repetition[:, None])
        logits = torch.where(is_repeated, scaled, logits)
        logits = logits - frequency[:, None] * counts - presence[:, None] * (counts > 0)
        logits = logits + self.bias[per_row]
        ends = self.ends[per_row]
        is_held = (ends >= 0) & (positions < self.first_end[per_row])[:, None]
        last, is_bad = self._bad_words(slots, per_row, drafts)
        held = torch.cat([torch.where(is_held, ends, -1), torch.where(is_bad, last, -1)], dim=1)
        held = torch.where(held < 0, logits.shape[1], held)  # one column more takes these
        banned = torch.zeros_like(logits[:, :1], dtype=torch.bool).expand(-1, logits.shape[1] + 1)
        logits = logits.masked_fill(banned.scatter(1, held, True)[:, :-1], float("-inf"))
        # p < min_p * max p, before the temperature divides both.
        floor = logits.amax(1) + temperatures * self.log_min_p[per_row]
        is_low = (logits < floor[:, None]) & (temperatures > 0)[:, None]
        return logits.masked_fill(is_low, float("-inf"))

    def _bad_words(self, slots: Tensor, per_row: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
        """(the last token of every word [R, W]; whether the text before each row, drafts included,
        ends in the rest of it [R, W])."""
        contexts, width = slots.shape[0] - drafts.shape[0], self.tail.shape[1]
        texts = torch.cat([self.tail[slots[contexts:]], drafts.to(torch.int64)], dim=1)
        before = torch.cat(
            [self.tail[slots[:contexts]], texts.unfold(1, width, 1).flatten(0, 1)]
        )  # [R, L-1]
        words = self.words[per_row]
        rest, last = words[..., :-1], words[..., -1]
        return last, ((rest == before[:, None]) | (rest < 0)).all(-1) & (last >= 0)

    def update(self, slots: Tensor, tokens: Tensor, lens: Tensor) -> None:
        """Takes what came out: slots [B], tokens [B, K'+1] int32 of which lens [B] are new."""
        width = self.tail.shape[1]
        texts = torch.cat([self.tail[slots], tokens.to(torch.int64)], dim=1)
        places = lens[:, None] + torch.arange(width, device=lens.device)
        self.tail[slots] = texts.gather(1, places.to(torch.int64))
        is_new = torch.arange(tokens.shape[1], device=tokens.device) < lens[:, None]
        place = slots[:, None] * self.counts.shape[1] + tokens.clamp_min(0).to(torch.int64)
        self.counts.view(-1).scatter_add_(0, place.flatten(), is_new.to(torch.int32).flatten())
