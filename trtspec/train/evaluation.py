"""How a draft head fares along sequences that it was not trained on."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..models.decoder import Decoder
from ..models.drafters.base import DraftHead
from .losses import StepScore, conditional_acceptance, score
from .records import Sequences
from .unroll import teach, unroll


@dataclass
class Evaluation:
    """Teacher-forced acceptance along held-out sequences."""

    right: list[int] = field(default_factory=list)
    judged: list[int] = field(default_factory=list)
    loss: float = 0.0
    errors: list[float] = field(default_factory=list)
    """Of each step's conditional share, the standard error between sequences, where known."""

    @property
    def is_judged(self) -> bool:
        """Whether there was a proposal to judge."""
        return any(self.judged)

    @property
    def conditional(self) -> list[float]:
        """Returns per step the share of right proposals where all before were right."""
        return [r / max(1, n) for r, n in zip(self.right, self.judged, strict=True)]

    @property
    def acceptance_length(self) -> float:
        """Returns the expected tokens per step at this acceptance: 1 + c0 + c0 c1 + …"""
        total, alive = 1.0, 1.0
        for rate in self.conditional:
            alive *= rate
            total += alive
        return total

    def add(self, scores: list[StepScore]) -> None:
        counts = conditional_acceptance(scores)
        if not self.right:
            self.right, self.judged = [0] * len(counts), [0] * len(counts)
        for i, (right, judged) in enumerate(counts):
            self.right[i] += right
            self.judged[i] += judged


@torch.no_grad()
def evaluate(
    target: Decoder,
    head: DraftHead,
    batches: list[Sequences],
    num_steps: int,
    variation: float = 0.0,
) -> Evaluation:
    """Measures a head along sequences that it was not trained on.

    Args:
        variation: the share of total variation in the loss.
    """
    device, result, losses = target.embed_tokens.weight.device, Evaluation(), 0.0
    for sequences in batches:
        sequences = sequences.to(device)
        teacher = teach(target, head, sequences)
        steps = unroll(head, sequences, teacher.hidden, num_steps)
        scores = [score(head, step, teacher, variation=variation) for step in steps]
        result.add(scores)
        losses += sum(float(each.loss) for each in scores) / max(1, len(scores))
    result.loss = losses / max(1, len(batches))
    return result
