"""`LogitsState`: penalties, biases and bans of requests, by slot.

The record is on the device, so that a step needs nothing from the host. It is allocated when the
first request needs it. `ops/tokens/penalties.py` applies it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..utils import rows_to_tensor, to_device

MAX_ENDS = 32
"""End tokens of one request that `min_tokens` can hold back."""
MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS = 64, 8


@dataclass(frozen=True)
class LogitsState:
    """S slots and one scratch slot; V tokens; E end tokens; W bad words of L tokens.

    It takes 9 bytes per slot and token of the vocabulary.
    """

    counts: Tensor  # [S+1, V] int32, in the output so far
    in_prompt: Tensor  # [S+1, V] bool
    bias: Tensor  # [S+1, V] float32; -inf bans
    penalties: Tensor  # [S+1, 3] float32: repetition, presence, frequency
    log_min_p: Tensor  # [S+1] float32, -inf is off
    ends: Tensor  # [S+1, E] int64, tokens that may not come before `first_end`, -1 none
    first_end: Tensor  # [S+1] int64, the first position at which they may come
    words: Tensor  # [S+1, W, L] int64, right-aligned, -1 before them
    tail: Tensor  # [S+1, L-1] int64, the sequence's last tokens, -1 before it begins
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
        self,
        slot: int,
        params: Any,
        prompt: Sequence[int],
        output: Sequence[int],
        held_back: Sequence[int],
    ) -> None:
        """Writes what a request asks of its logits to `slot`. A preempted request has output.

        A request that asks for nothing clears what the slot's last request asked for.

        Args:
            params: its SamplingParams. held_back: by `min_tokens`, at most MAX_ENDS of them in
                the vocabulary.
        """
        if not params.shapes_logits and slot not in self.shaped_slots:
            return
        self.shaped_slots.add(slot)  # first, so that it holds even if what follows raises
        device, vocab = self.counts.device, self.counts.shape[1]
        tokens = torch.tensor([*prompt, *output], dtype=torch.int64)
        counts = torch.bincount(tokens[len(prompt) :], minlength=vocab).to(torch.int32)
        in_prompt = torch.bincount(tokens[: len(prompt)], minlength=vocab) > 0
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
        ends = [token for token in held_back if token < vocab] if params.min_tokens else []
        ends += [-1] * (MAX_ENDS - len(ends))
        self.ends[slot] = rows_to_tensor(ends, torch.int64, device)
        first = min(len(prompt) + params.min_tokens, torch.iinfo(torch.int64).max)
        self.first_end[slot : slot + 1] = rows_to_tensor([first], torch.int64, device)
        count, longest = self.words.shape[1:]
        words = [[-1] * (longest - len(word)) + list(word) for word in params.bad_words or ()]
        words += [[-1] * longest] * (count - len(words))
        self.words[slot] = rows_to_tensor(words, torch.int64, device)
        tail = [-1] * self.tail.shape[1] + tokens.tolist()[-self.tail.shape[1] :]
        self.tail[slot] = rows_to_tensor(tail[-self.tail.shape[1] :], torch.int64, device)
        if not params.shapes_logits:
            self.shaped_slots.remove(slot)
