"""Relaxed acceptance for thinking phases (TensorRT-LLM's, for DeepSeek-R1). Lossy by intent.

While a greedy request thinks, a draft is kept if it is among the target's `top_k` tokens *and* its
probability is at least the top one's minus `delta`. What comes out are the draft tokens, then the
target's own token at the first miss. Outside a thinking phase acceptance is strict.

Whether a slot thinks is one number per slot: its delta, or `NOT_THINKING`. A request thinks if the
last marker of its prompt is `begin`, until `end` is among the tokens it accepts; that takes effect
in the next step. A `begin` that the model writes itself changes nothing: what is lossy starts only
where the prompt asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..metadata.sampling import rows_to_tensor
from ..ops.tokens.accept import mask_after
from ..ops.tokens.greedy import Accepted, RelaxedRule
from .rule import Candidates, Drawn, Judged, Rule, greedy_kernel

NOT_THINKING = -1.0
_STATE = "thinking_deltas"


@dataclass(frozen=True)
class Relaxed(Rule):
    """Another rule, relaxed for greedy requests that think.

    State: `thinking_deltas` [S+1] float32.
    """

    rule: Rule
    top_k: int
    delta: float
    begin_token: int
    end_token: int
    state_names: ClassVar[tuple[str, ...]] = (_STATE,)

    @property
    def drawn(self) -> Drawn:  # type: ignore[override]
        return self.rule.drawn

    def judge(self, given: Candidates) -> Judged:
        judged = self.rule.judge(given)
        tokens, lens = self._relax(given, judged.tokens, judged.lens)
        return replace(judged, tokens=tokens, lens=lens)

    def accept(self, given: Candidates, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self._relax(given, *self.rule.accept(given, tokens))

    def by_kernel(self, given: Candidates, forced_len: int = 0) -> Accepted | None:
        """For batches of greedy generations; the kernel updates the state too."""
        if given.num_contexts or not given.sampling.all_greedy:
            return None
        deltas, slots = given.step.state[_STATE], given.step.slot_ids
        relaxed = RelaxedRule(deltas, slots, self.top_k, self.end_token)
        return greedy_kernel(given, forced_len, relaxed)

    def _relax(self, given: Candidates, tokens: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
        """Accepts more drafts of greedy requests: tokens [B, K'+1] int32, lens [B] int32."""
        contexts, (generations, num_drafts) = given.num_contexts, given.drafts.shape
        if generations == 0:
            return tokens, lens
        deltas, slots = given.step.state[_STATE], given.step.slot_ids
        judging = given.logits[contexts:].view(generations, num_drafts + 1, -1)[:, :-1]
        close = relaxed_matches(judging, given.drafts, deltas[slots[contexts:]], self.top_k)
        more, more_lens = relaxed_acceptance(tokens[contexts:], given.drafts, close)
        if not given.sampling.all_greedy:  # one row per request is enough: its first
            is_greedy = given.sampling.temperatures[contexts :: num_drafts + 1] == 0
            more = torch.where(is_greedy[:, None], more, tokens[contexts:])
            more_lens = torch.where(is_greedy, more_lens, lens[contexts:])
        return torch.cat([tokens[:contexts], more]), torch.cat([lens[:contexts], more_lens])

    # -- state by slot -------------------------------------------------------------------------
    def allocate_state(self, num_slots: int, device: torch.device) -> dict[str, Tensor]:
        return {_STATE: torch.zeros(num_slots + 1, device=device)}

    def admit(
        self, state: dict[str, Tensor], slot: int, prompt: Sequence[int], output: Sequence[int]
    ) -> None:
        delta = delta_of_text(prompt, output, self.begin_token, self.end_token, self.delta)
        deltas = state[_STATE]
        deltas[slot : slot + 1] = rows_to_tensor([delta], torch.float32, deltas.device)

    def update(self, given: Candidates, tokens: Tensor, lens: Tensor) -> None:
        deltas, slots = given.step.state[_STATE], given.step.slot_ids
        lens = given.step.text_lens(lens)
        deltas[slots] = next_deltas(deltas[slots], tokens, lens, self.end_token)


def delta_of_text(
    prompt: Sequence[int], output: Sequence[int], begin: int, end: int, delta: float
) -> float:
    """The delta of a request with this prompt and, after a preemption, this output so far."""
    for token in reversed(prompt):
        if token in (begin, end):
            return delta if token == begin and end not in output else NOT_THINKING
    return NOT_THINKING


def relaxed_matches(logits: Tensor, drafts: Tensor, deltas: Tensor, top_k: int) -> Tensor:
    """Which drafts are close enough to the target's best.

    Args:
        logits: [G, K, V], the target's at the rows that judge the drafts, temperature 1.
        drafts: [G, K] int32, -1 never matches.
        deltas: [G] float32, `NOT_THINKING` matches nothing.

    Returns:
        [G, K] bool.
    """
    logits = logits.float()
    own = logits.gather(-1, drafts.clamp_min(0).to(torch.int64)[..., None])  # [G, K, 1]
    is_in_top_k = (logits > own).sum(-1) < top_k
    total = logits.logsumexp(-1)
    best = (logits.amax(-1) - total).exp()
    close = (own[..., 0] - total).exp() >= best - deltas[:, None]
    is_possible = own[..., 0] > float("-inf")  # not masked by a grammar
    return is_in_top_k & close & is_possible & (drafts >= 0) & (deltas[:, None] >= 0)


def relaxed_acceptance(
    target_tokens: Tensor, drafts: Tensor, relaxed: Tensor
) -> tuple[Tensor, Tensor]:
    """Strict acceptance, or better where a draft is close enough.

    Args:
        target_tokens: [G, K+1] int32. drafts: [G, K] int32. relaxed: [G, K] bool.

    Returns:
        (tokens [G, K+1] int32: the drafts while they are kept, the target's tokens after that;
        lens [G] int32 in 1 … K+1).
    """
    kept = ((drafts == target_tokens[:, :-1]) | relaxed).to(torch.int32).cumprod(dim=1)
    own = torch.where(kept.bool(), drafts, target_tokens[:, :-1])
    lens = 1 + kept.sum(dim=1, dtype=torch.int32)
    return torch.cat([own, target_tokens[:, -1:]], dim=1), lens


def next_deltas(deltas: Tensor, tokens: Tensor, lens: Tensor, end: int) -> Tensor:
    """[B] deltas after accepting tokens [B, K+1] of lengths lens [B]."""
    has_ended = (mask_after(tokens, lens) == end).any(1)
    return torch.where(has_ended, NOT_THINKING, deltas)
