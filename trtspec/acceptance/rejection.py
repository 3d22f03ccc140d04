"""Lossless acceptance of drafts that were drawn from a known distribution.

With p the target's distribution at a row and q the drafter's, a draft d ~ q is accepted with
probability min(1, p(d) / q(d)). The token after the accepted drafts is drawn from
norm(max(p - q, 0)) if a draft was rejected, else from p. The output is then distributed as the
target's (Leviathan et al., 2023; Chen et al., 2023). Block verification judges all drafts of a step
together and accepts at least as many (Sun et al., 2024).

All noise is keyed by the request's seed, the token's position and its depth in the step. So the
next step never meets the noise of a draft that was rejected at the same position.

Sizes: G requests, K drafts verified, V target tokens, Vd draft tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..metadata.draft_memory import DraftMemory
from ..metadata.sampling import SamplingMetadata
from ..ops.tokens.greedy import Accepted
from ..ops.tokens.noise import NoiseStream, exponential_noise, uniform_noise
from ..ops.tokens.sample import apply_filters, clean_logits, greedy_tokens, is_on_cpu
from .rule import Candidates, Drawn, Judged, sampled_kernel
from .strict import Match
from .target import sample_target_tokens


@dataclass(frozen=True)
class DraftDistributions:
    """The distributions that a step's drafts were drawn from. Logits are before temperature.

    A draft that is certain has a distribution too: all of it is on the draft.
    """

    logits: Tensor  # [G, K, Vd]
    log_q: Tensor  # [G, K] float32, of the drafts themselves
    target_ids: Tensor | None  # [Vd] int64; None: the same vocabulary
    certain: Tensor  # [G, K] int64, the draft where it is certain, else -1

    @staticmethod
    def of(memory: DraftMemory, slots: Tensor, drafts: Tensor) -> DraftDistributions:
        """Gathers those of drafts [G, K] int32 in these slots [G]."""
        num_drafts, are_certain = drafts.shape[1], memory.are_certain[slots, None]
        log_q = memory.log_q[slots, :num_drafts].masked_fill(are_certain, 0.0)
        return DraftDistributions(
            logits=memory.logits[slots, :num_drafts],
            log_q=log_q,
            target_ids=memory.target_ids,
            certain=torch.where(are_certain, drafts.to(torch.int64), -1),
        )

    def probabilities(self, temperatures: Tensor, vocab_size: int, rows: Tensor) -> Tensor:
        """Returns q of one row per request over the target's vocabulary, [G, V] float32.

        Args:
            temperatures: [G], > 0. rows: [G] int64 in 0 … K-1.
        """
        index = torch.arange(rows.shape[0], device=rows.device)
        q = scaled_logits(self.logits[index, rows], temperatures)[0].softmax(-1)
        if self.target_ids is not None:
            q = q.new_zeros((q.shape[0], vocab_size)).index_copy_(1, self.target_ids, q)
        certain = self.certain[index, rows][:, None]
        is_certain = certain >= 0
        q.masked_fill_(is_certain, 0.0)
        return q.scatter_add_(1, certain.clamp_min(0), is_certain.to(q.dtype))


Verdict = Callable[[Tensor, Tensor, DraftDistributions, SamplingMetadata], tuple[Tensor, Tensor]]
"""`token_rejection` and its like."""


@dataclass(frozen=True, kw_only=True)
class Rejection(Match):
    """Rules `rejection` and `block`. Without a `DraftMemory` they are exact match."""

    verdict: Verdict
    is_block: bool = False
    drawn: Drawn = Drawn.REMEMBERED

    def judge(self, candidates: Candidates) -> Judged:
        """Judges greedy requests by exact match, sampled ones by the verdict."""
        memory, sampling, slots = candidates.memory, candidates.sampling, candidates.step.slot_ids
        if memory is None or sampling.all_greedy or not candidates.drafts.numel():
            return super().judge(candidates)
        contexts, num_drafts, drafts = (
            candidates.num_contexts,
            candidates.num_drafts,
            candidates.drafts,
        )
        logits, bad_rows = clean_logits(candidates.logits)
        tokens, lens = self.accept(candidates, _best_tokens(logits, sampling.temperatures))
        if contexts:
            sampling_of_contexts = sampling.select(slice(contexts))
            first, _ = sample_target_tokens(logits[:contexts], sampling_of_contexts)
            tokens[:contexts, 0] = first
        rows = sampling.select(slice(contexts, None))
        log_p = target_log_probs(logits[contexts:], rows).view(len(drafts), num_drafts + 1, -1)
        drawn_from = DraftDistributions.of(memory, slots[contexts:], drafts)
        count, token = self.verdict(log_p, drafts, drawn_from, rows)
        columns = torch.arange(num_drafts + 1, device=drafts.device)
        judged = torch.where(
            columns < count[:, None], nn.functional.pad(drafts, (0, 1)), tokens[contexts:]
        )
        judged = torch.where(columns == count[:, None], token[:, None], judged)
        is_sampled = rows.temperatures[:: num_drafts + 1] > 0
        generations = torch.where(is_sampled[:, None], judged, tokens[contexts:])
        their_lens = torch.where(is_sampled, (count + 1).to(lens.dtype), lens[contexts:])
        return Judged(
            tokens=torch.cat([tokens[:contexts], generations]),
            lens=torch.cat([lens[:contexts], their_lens]),
            bad_rows=bad_rows,
        )

    def by_kernel(self, candidates: Candidates, forced_len: int = 0) -> Accepted | None:
        if candidates.sampling.all_greedy:
            return super().by_kernel(candidates, forced_len)
        return sampled_kernel(candidates, forced_len, is_remembered=True, is_block=self.is_block)


def _best_tokens(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Returns the best token of each greedy row: [R] int32, anything for the others."""
    if not is_on_cpu(logits):
        return greedy_tokens(logits)
    tokens = torch.zeros(logits.shape[0], dtype=torch.int32)
    rows = (temperatures <= 0).nonzero()[:, 0]
    if rows.numel():
        tokens[rows] = greedy_tokens(logits[rows])
    return tokens


def target_log_probs(logits: Tensor, sampling: SamplingMetadata) -> Tensor:
    """Returns log p [R, V] float32 of the target, after temperature and filters.

    Args:
        logits: [R, V], no NaN. sampling: R rows; a greedy row's temperature counts as 1.
    """
    scaled, _ = scaled_logits(logits, sampling.temperatures)
    return apply_filters(scaled, sampling).log_softmax(-1)


def scaled_logits(logits: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """Returns ((logits - best) / T [R, V] float32, best [R] float32).

    The best is at 0 so that a tiny temperature overflows nowhere. A greedy row's temperature counts
    as 1.
    """
    scaled = logits.to(torch.float32, copy=True).clamp_(max=torch.finfo(torch.float32).max)
    best = scaled.amax(-1)
    divisors = torch.where(temperatures > 0, temperatures, 1.0)
    return scaled.sub_(best[:, None]).div_(divisors[:, None]), best


def token_rejection(
    log_p: Tensor, drafts: Tensor, draft: DraftDistributions, sampling: SamplingMetadata
) -> tuple[Tensor, Tensor]:
    """Judges draft after draft.

    Args:
        log_p: [G, K+1, V]. drafts: [G, K] int32; -1 is no draft, and only -1 follows it.
        sampling: [G * (K+1)] rows; `positions` are those of the tokens to be chosen.

    Returns:
        (number of accepted drafts [G] int64, the token after them [G] int32).
    """
    log_ratio = _log_p_of(log_p, drafts) - draft.log_q
    is_accepted = (_coins(sampling, drafts).log() < log_ratio) & (drafts >= 0)
    count = is_accepted.to(torch.int64).cumprod(1).sum(1)
    no_scale = log_p.new_ones(drafts.shape[0])
    return count, _next_token(log_p, drafts, draft, sampling, count, no_scale)


def block_rejection(
    log_p: Tensor, drafts: Tensor, draft: DraftDistributions, sampling: SamplingMetadata
) -> tuple[Tensor, Tensor]:
    """Judges the drafts of a step together; arguments and result as in `token_rejection`.

    Sun et al., "Block verification accelerates speculative decoding" (2024), algorithm 2. Let
    w[0] = 1 and w[i] = min(w[i-1] p(d[i]) / q(d[i]), 1). Let s be the sum of max(w[i] p - q, 0)
    over the vocabulary at the next position, and h[i] = s / (s + 1 - w[i]). For the last draft
    h[i] = w[i]. The first i drafts are accepted, for the largest i whose coin is at most h[i]. The
    token after them is drawn from that difference.
    """
    num_requests, num_drafts = drafts.shape
    if num_drafts == 0:
        return token_rejection(log_p, drafts, draft, sampling)
    ratios = (_log_p_of(log_p, drafts) - draft.log_q).exp()
    coins = _coins(sampling, drafts)
    temperatures = sampling.temperatures.view(num_requests, -1)[:, 0]
    weight = torch.ones_like(ratios[:, 0])
    weights = [weight]
    count = torch.zeros(num_requests, dtype=torch.int64, device=drafts.device)
    for i in range(1, num_drafts + 1):
        exists = drafts[:, i - 1] >= 0
        weight = torch.where(exists, (weight * ratios[:, i - 1]).clamp(max=1.0), 0.0)
        weights.append(weight)
        keep = weight  # of the last draft
        if i < num_drafts:
            rows = torch.full_like(count, i)
            q = draft.probabilities(temperatures, log_p.shape[-1], rows)
            left = (weight[:, None] * log_p[:, i].exp() - q).clamp_min(0).sum(-1)
            inner = left / (left + 1.0 - weight).clamp_min(1e-30)
            keep = torch.where(drafts[:, i] >= 0, inner, weight)
        count = torch.where(exists & (coins[:, i - 1] <= keep), i, count)
    scale = torch.stack(weights, dim=1).gather(1, count[:, None])[:, 0]
    return count, _next_token(log_p, drafts, draft, sampling, count, scale)


def _log_p_of(log_p: Tensor, drafts: Tensor) -> Tensor:
    """Returns the target's log probability of each draft, [G, K] float32."""
    ids = drafts.clamp_min(0).to(torch.int64)[..., None]
    return log_p[:, :-1].gather(-1, ids)[..., 0]


def _coins(sampling: SamplingMetadata, drafts: Tensor) -> Tensor:
    """Draws [G, K] float32 in (0, 1), keyed by the draft's position and its depth."""
    num_requests, num_drafts = drafts.shape
    seeds = sampling.seeds.view(num_requests, -1)[:, :-1].reshape(-1)
    positions = sampling.positions.view(num_requests, -1)[:, :-1].reshape(-1)
    depth = torch.arange(num_drafts, device=drafts.device).repeat(num_requests)[:, None]
    coins = uniform_noise(seeds, positions, NoiseStream.ACCEPTANCE, depth)
    return coins.view(num_requests, num_drafts)


def _next_token(
    log_p: Tensor,
    drafts: Tensor,
    draft: DraftDistributions,
    sampling: SamplingMetadata,
    count: Tensor,
    scale: Tensor,
) -> Tensor:
    """Draws the token after `count` accepted drafts, [G] int32.

    It is drawn from max(scale * p - q, 0) where a draft was rejected, else from p.
    """
    num_requests, num_drafts = drafts.shape
    index = torch.arange(num_requests, device=drafts.device)
    p = log_p[index, count].exp()
    if num_drafts:
        depth = count.clamp(max=num_drafts - 1)
        is_rejected = (count < num_drafts) & (drafts[index, depth] >= 0)
        temperatures = sampling.temperatures.view(num_requests, -1)[:, 0]
        q = draft.probabilities(temperatures, p.shape[-1], depth)
        left = (scale[:, None] * p).sub_(q).clamp_min_(0)
        # Where q equals p up to rounding nothing is left of p, and p itself is as good.
        is_rejected &= left.sum(-1) > 0
        p = torch.where(is_rejected[:, None], left, p)
    seeds = sampling.seeds.view(num_requests, -1)[:, 0]
    positions = sampling.positions.view(num_requests, -1)[index, count]
    noise = exponential_noise(seeds, positions, NoiseStream.TARGET, p.shape[-1])
    return greedy_tokens(p.div_(noise))
