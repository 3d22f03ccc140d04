"""Drawing the drafts of sampled requests, and keeping what they were drawn from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..acceptance.rejection import DraftDistributions, draft_log_probs
from ..ops.noise import NoiseStream, gumbel_noise, of_depth


@dataclass(frozen=True)
class DraftMemory:
    """What the drafts in the slots were drawn from, by slot (the last slot is scratch)."""

    logits: Tensor  # [S+1, K, Vd] in the drafter's dtype, before temperature
    log_q: Tensor  # [S+1, K] float32, of the drafts themselves
    target_ids: Tensor | None  # [Vd] int64; None: the drafter's vocabulary is the target's

    @staticmethod
    def allocate(
        num_slots: int, max_draft_len: int, vocab_size: int, d2t: Tensor | None,
        device: torch.device, dtype: torch.dtype,
    ) -> DraftMemory:  # fmt: skip
        """Args: vocab_size: Vd. d2t: [Vd] offsets from draft to target ids."""
        shape = num_slots + 1, max_draft_len
        return DraftMemory(
            torch.zeros(*shape, vocab_size, dtype=dtype, device=device),
            torch.zeros(shape, device=device),
            None if d2t is None else d2t + torch.arange(vocab_size, device=d2t.device),
        )

    def of(self, slots: Tensor, num_drafts: int) -> DraftDistributions:
        """Of the first `num_drafts` drafts in these slots [G]."""
        return DraftDistributions(
            self.logits[slots, :num_drafts], self.log_q[slots, :num_drafts], self.target_ids
        )


@dataclass(frozen=True)
class DraftSampler:
    """Draws the drafts of one step; a greedy request's are its drafter's best tokens."""

    temperatures: Tensor  # [B] float32
    seeds: Tensor  # [B] int64
    slots: Tensor | None  # [B] int64, for the memory
    memory: DraftMemory | None  # None: what was drawn from need not be known again

    def draw(
        self, logits: Tensor, d2t: Tensor | None, last_positions: Tensor, depth: int
    ) -> Tensor:
        """One draft per request.

        Without a memory the noise is the target's own at that position, so that its sample is
        likely the same token (a coupling by common Gumbel noise); with one it is the draft's.

        Args:
            logits: [B, Vd]. d2t: [Vd] offsets from draft to target ids.
            last_positions: [B] int64, of the last accepted token. depth: 0 … K-1.

        Returns:
            [B] int32 target ids.
        """
        logits = torch.where(logits.isnan(), float("-inf"), logits)
        scaled = draft_log_probs(logits, self.temperatures)
        positions = last_positions + 1 + depth
        stream = int(NoiseStream.TARGET)
        entries = torch.arange(logits.shape[-1], device=logits.device)
        if self.memory is not None:
            stream = of_depth(NoiseStream.DRAFT, depth)
        elif d2t is not None:
            entries = entries + d2t
        noise = gumbel_noise(self.seeds, positions, stream, entries)
        is_sampled = self.temperatures > 0
        drafts = torch.where(is_sampled, (scaled + noise).argmax(-1), scaled.argmax(-1))
        if self.memory is not None:
            assert self.slots is not None
            self.memory.logits[self.slots, depth] = logits.to(self.memory.logits.dtype)
            self.memory.log_q[self.slots, depth] = scaled.gather(1, drafts[:, None])[:, 0]
        return (drafts if d2t is None else drafts + d2t[drafts]).to(torch.int32)
