"""Relaxed acceptance for thinking phases (TensorRT-LLM's, for DeepSeek-R1). Lossy by intent.

While a greedy request thinks, a draft is accepted if it is among the target's `top_k` tokens *and*
its probability is at least the top one's minus `delta`. The output is the accepted drafts, then the
target's token where a draft was rejected. Outside a thinking phase acceptance is strict.

Each slot has one number: its delta while its request thinks, else `NOT_THINKING`. A request thinks
if the last marker of its prompt is `begin`. It stops with the step after the one that accepts
`end`. A `begin` that the model writes changes nothing: only a prompt can ask for lossy acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..ops.tokens.accept import mask_after
from ..ops.tokens.greedy import Accepted, RelaxedRule
from ..utils import rows_to_tensor
from .rule import Candidates, Drawn, Judged, Rule, greedy_kernel

NOT_THINKING = -1.0
_STATE = "thinking_deltas"


@dataclass(frozen=True)
class Relaxed(Rule):
    """Wraps a rule and relaxes it for greedy requests that think.

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

    def judge(self, candidates: Candidates) -> Judged:
        judged = self.rule.judge(candidates)
        tokens, lens = self._relax(candidates, judged.tokens, judged.lens)
        return replace(judged, tokens=tokens, lens=lens)

    def accept(self, candidates: Candidates, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self._relax(candidates, *self.rule.accept(candidates, tokens))

    def by_kernel(self, candidates: Candidates, forced_len: int = 0) -> Accepted | None:
        """Serves batches of greedy generations. The kernel updates the state too."""
        if candidates.num_contexts or not candidates.sampling.all_greedy:
            return None
        deltas, slots = candidates.step.state[_STATE], candidates.step.slot_ids
        relaxed = RelaxedRule(deltas, slots, self.top_k, self.end_token)
        return greedy_kernel(candidates, forced_len, relaxed)

    def _relax(self, candidates: Candidates, tokens: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
        """Accepts more drafts of greedy requests: tokens [B, K'+1] int32, lens [B] int32."""
        contexts, (generations, num_drafts) = candidates.num_contexts, candidates.drafts.shape
        if generations == 0:
            return tokens, lens
        deltas, slots = candidates.step.state[_STATE], candidates.step.slot_ids
        judging = candidates.logits[contexts:].view(generations, num_drafts + 1, -1)[:, :-1]
        close = relaxed_matches(judging, candidates.drafts, deltas[slots[contexts:]], self.top_k)
        more, more_lens = relaxed_acceptance(tokens[contexts:], candidates.drafts, close)
        if not candidates.sampling.all_greedy:  # one row per request is enough: its first
            is_greedy = candidates.sampling.temperatures[contexts :: num_drafts + 1] == 0
            more = torch.where(is_greedy[:, None], more, tokens[contexts:])
            more_lens = torch.where(is_greedy, more_lens, lens[contexts:])
        return torch.cat([tokens[:contexts], more]), torch.cat([lens[:contexts], more_lens])

    # -- state by slot -------------------------------------------------------------------------
    def allocate_state(self, num_slots: int, device: torch.device) -> dict[str, Tensor]:
        return {_STATE: torch.zeros(num_slots + 1, device=device)}

    def admit(
        self, state: dict[str, Tensor], slot: int, prompt: Sequence[int], output: Sequence[int]
    ) -> None:
        delta = delta_of_request(prompt, output, self.begin_token, self.end_token, self.delta)
        deltas = state[_STATE]
        deltas[slot : slot + 1] = rows_to_tensor([delta], torch.float32, deltas.device)

    def update(self, candidates: Candidates, tokens: Tensor, lens: Tensor) -> None:
        deltas, slots = candidates.step.state[_STATE], candidates.step.slot_ids
        lens = candidates.step.output_lens(lens)
        deltas[slots] = next_deltas(deltas[slots], tokens, lens, self.end_token)


def delta_of_request(
    prompt: Sequence[int], output: Sequence[int], begin: int, end: int, delta: float
) -> float:
    """Returns the delta of a request with this prompt and, after a preemption, this output."""
    for token in reversed(prompt):
        if token in (begin, end):
            return delta if token == begin and end not in output else NOT_THINKING
    return NOT_THINKING


def relaxed_matches(logits: Tensor, drafts: Tensor, deltas: Tensor, top_k: int) -> Tensor:
    """Returns which drafts are close enough to the target's best token.

    Args:
        logits: [G, K, V], the target's at the rows that judge the drafts, temperature 1.
        drafts: [G, K] int32, -1 never matches.
        deltas: [G] float32, `NOT_THINKING` matches nothing.

    Returns:
        [G, K] bool.
    """
    logits = logits.float()
    of_drafts = logits.gather(-1, drafts.clamp_min(0).to(torch.int64)[..., None])  # [G, K, 1]
    is_in_top_k = (logits > of_drafts).sum(-1) < top_k
    total = logits.logsumexp(-1)
    best = (logits.amax(-1) - total).exp()
    close = (of_drafts[..., 0] - total).exp() >= best - deltas[:, None]
    is_possible = of_drafts[..., 0] > float("-inf")  # not masked by a grammar
    return is_in_top_k & close & is_possible & (drafts >= 0) & (deltas[:, None] >= 0)


def relaxed_acceptance(
    target_tokens: Tensor, drafts: Tensor, relaxed: Tensor
) -> tuple[Tensor, Tensor]:
    """Accepts drafts that match the target's token or are close enough.

    Args:
        target_tokens: [G, K+1] int32. drafts: [G, K] int32. relaxed: [G, K] bool.

    Returns:
        (tokens [G, K+1] int32: accepted drafts, then the target's tokens; lens [G] int32 in
        1 … K+1).
    """
    accepted = ((drafts == target_tokens[:, :-1]) | relaxed).to(torch.int32).cumprod(dim=1)
    tokens = torch.where(accepted.bool(), drafts, target_tokens[:, :-1])
    lens = 1 + accepted.sum(dim=1, dtype=torch.int32)
    return torch.cat([tokens, target_tokens[:, -1:]], dim=1), lens


def next_deltas(deltas: Tensor, tokens: Tensor, lens: Tensor, end: int) -> Tensor:
    """Returns the deltas [B] after accepting tokens [B, K+1] of lengths lens [B]."""
    has_ended = (mask_after(tokens, lens) == end).any(1)
    return torch.where(has_ended, NOT_THINKING, deltas)
