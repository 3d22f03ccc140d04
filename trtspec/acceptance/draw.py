"""Draws the drafts of sampled requests, and keeps what they were drawn from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..metadata.draft_memory import DraftMemory
from ..metadata.step import StepContext
from ..ops.launch.dispatch import sampling_kernels
from ..ops.tokens.noise import NoiseStream, gumbel_noise, of_depth
from ..ops.tokens.sample import argmax
from .rejection import scaled_logits


@dataclass(frozen=True)
class DraftSampler:
    """Draws the drafts of one step. Greedy requests take their drafter's best tokens."""

    temperatures: Tensor  # [B] float32
    seeds: Tensor  # [B] int64
    slots: Tensor  # [B] int64, for the memory; [0] in a loop that has neither memory nor slots
    memory: DraftMemory | None  # None: the rule does not ask what drafts were drawn from

    @staticmethod
    def of(step: StepContext, memory: DraftMemory | None) -> DraftSampler:
        """Takes each request's parameters from the first of its rows."""
        (contexts, generations, _), sampling = step.sizes, step.sampling
        rows = (sampling.seeds.shape[0] - contexts) // max(generations, 1)

        def of_requests(values: Tensor) -> Tensor:
            if not contexts:
                return values[::rows]
            return torch.cat([values[:contexts], values[contexts :: max(rows, 1)]])

        return DraftSampler(
            temperatures=of_requests(sampling.temperatures),
            seeds=of_requests(sampling.seeds),
            slots=step.slot_ids,
            memory=memory,
        )

    def draw(
        self, logits: Tensor, d2t: Tensor | None, last_positions: Tensor, depth: int
    ) -> Tensor:
        """Draws one draft per request.

        With a memory the noise is the draft's. Without one it is the noise with which the target
        samples at that position, so that both are likely to choose the same token.

        Args:
            logits: [B, Vd]. d2t: [Vd] offsets from draft to target ids.
            last_positions: [B] int64, of the last accepted token. depth: 0 … K-1.

        Returns:
            [B] int32 target ids.
        """
        kernels = sampling_kernels(logits)
        if kernels is not None:
            return kernels.draw_drafts(
                logits,
                d2t,
                self.temperatures,
                self.seeds,
                last_positions,
                depth,
                self.slots,
                self.memory,
            )
        logits = torch.where(logits.isnan(), float("-inf"), logits)
        scaled, best = scaled_logits(logits, self.temperatures)
        log_sum = scaled.logsumexp(-1)
        positions = last_positions + 1 + depth
        stream = int(NoiseStream.TARGET)
        entries = torch.arange(logits.shape[-1], device=logits.device)
        if self.memory is not None:
            stream = of_depth(NoiseStream.DRAFT, depth)
        elif d2t is not None:
            entries = entries + d2t
        noise = gumbel_noise(self.seeds, positions, stream, entries)
        drafts = argmax(noise.mul_((self.temperatures > 0)[:, None]).add_(scaled))
        if self.memory is not None:
            entry = self.slots, depth
            self.memory.logits[entry] = logits.to(self.memory.logits.dtype)
            self.memory.best[entry], self.memory.log_sum[entry] = best, log_sum
            self.memory.log_q[entry] = scaled.gather(1, drafts[:, None])[:, 0] - log_sum
        return (drafts if d2t is None else drafts + d2t[drafts]).to(torch.int32)
